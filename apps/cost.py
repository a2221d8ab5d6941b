"""What a run will cost: `flower-dp epsilon` and `flower-dp calibrate` call this for the settings of a method or a preset."""

from collections.abc import Mapping
from typing import Any

from apps.methods import Run
from apps.own_config import run_of
from apps.records import config_of, deal
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.forecast import forecast


def cost(run_config: Mapping[str, Any], *, own_model: bool = False) -> PrivacyStatement:
    """Return the statement that a run of these settings will end with.

    Args:
        run_config: the settings.
        own_model: whether they are those of an app around somebody's own model and data (`flower_dp.app`).

    Raises:
        ValueError: naming the invalid setting, or if records are needed for their number and cannot be read.
    """
    run = run_of(run_config) if own_model else Run.of(run_config)

    def sizes() -> dict[str, int]:
        if own_model:
            raise ValueError(
                f"method={run.settings.method}: epsilon follows from every client's number of records, and the app's data are "
                "not read here; start the run"
            )
        return {name: len(records) for name, records in deal(config_of(run_config)).clients.items()}

    return forecast(run.strategy(sizes), num_rounds=run.settings.num_rounds, names=run.settings.client_names())
