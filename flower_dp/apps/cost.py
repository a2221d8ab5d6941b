"""What a run will cost: `flower-dp epsilon` and `flower-dp calibrate` call this for the settings of a method or a preset."""

from collections.abc import Mapping
from typing import Any

from dp_accounting import DpEvent

from flower_dp.apps.methods import Run
from flower_dp.apps.own_config import run_of
from flower_dp.apps.records import config_of, deal
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.forecast import forecast, outside_event


def cost(run_config: Mapping[str, Any], *, own_model: bool = False) -> PrivacyStatement:
    """Return the statement that a run of these settings will end with.

    Args:
        run_config: the settings.
        own_model: whether they are those of an app around somebody's own model and data (`flower_dp.app`).

    Raises:
        ValueError: naming the invalid setting, or if records are needed for their number and cannot be read.
    """
    return forecast(**_planned(run_config, own_model=own_model))


def outside(run_config: Mapping[str, Any], *, own_model: bool = False) -> tuple[DpEvent, PrivacyStatement]:
    """Return what a run of these settings is charged with against those who are no clients, and its statement.

    Raises:
        ValueError: if every device has a ledger of its own; or as `cost`.
    """
    return outside_event(**_planned(run_config, own_model=own_model))


def _planned(run_config: Mapping[str, Any], *, own_model: bool) -> dict[str, Any]:
    run = run_of(run_config) if own_model else Run.of(run_config)

    def sizes() -> dict[str, int]:
        if own_model:
            raise ValueError(
                f"method={run.settings.method}: epsilon follows from every client's number of records, and the app's data are "
                "not read here; start the run"
            )
        return {name: len(records) for name, records in deal(config_of(run_config)).clients.items()}

    strategy = run.strategy(sizes)
    return {"strategy": strategy, "num_rounds": run.settings.num_rounds, "names": run.settings.client_names()}
