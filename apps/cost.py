"""What a run will cost: `flower-dp epsilon` and `flower-dp calibrate` call this for the settings of a method or a preset."""

from collections.abc import Mapping
from typing import Any

from apps.methods import Run
from apps.records import config_of, deal
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.forecast import forecast


def cost(run_config: Mapping[str, Any]) -> PrivacyStatement:
    """Return the statement that a run of these settings will end with.

    Raises:
        ValueError: naming the invalid setting, or if records are needed for their number and cannot be read.
    """
    run = Run.of(run_config)
    sizes = lambda: {name: len(records) for name, records in deal(config_of(run_config)).clients.items()}  # noqa: E731
    return forecast(run.strategy(sizes), num_rounds=run.settings.num_rounds, names=run.settings.client_names())
