"""An app whose model and data the run-config names: `model-fn`, `data-fn` and, if wanted, `evaluate-fn`, as "module:function".

Name `flower_dp.from_config:app.server` and `flower_dp.from_config:app.client` under [tool.flwr.app.components].
"""

import flower_dp

app = flower_dp.app()
