"""An app whose model and data are named in the run-config.

The keys are `model-fn`, `data-fn` and optionally `evaluate-fn`, each as "module:function".

Name `flower_dp.from_config:app.server` and `flower_dp.from_config:app.client` under [tool.flwr.app.components].
"""

import flower_dp

app = flower_dp.app()
