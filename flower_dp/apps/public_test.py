"""What a run's final model is tested with: `flower-dp figure landscape` calls this for the run's own settings."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.methods import Run
from flower_dp.apps.records import config_of, records_to_test_with
from flower_dp.apps.tasks.models import loss_of
from flower_dp.reporting.landscape import PublicTest


def public_test(run_config: Mapping[str, Any]) -> PublicTest:
    """Return the model, its loss and the public test records of a run.

    Raises:
        ValueError: naming the invalid setting, or if the records cannot be read.
    """
    run = Run.of(run_config)
    records = records_to_test_with(run, config_of(run_config))
    return PublicTest(module=run.model(), loss=loss_of(run.settings.model), records=records)
