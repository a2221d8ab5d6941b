"""The functions of flower-dp's own app that commands call.

`run` calls `check`; `epsilon` and `calibrate` call `cost`; `figure landscape` calls `public_test`.
"""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.client_parts import training_of
from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.records import config_of, records_to_test_with, sizes_of
from flower_dp.apps.tasks.models import loss_of
from flower_dp.core import dp_events
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.reporting.landscape import PublicTest
from flower_dp.strategies.forecast import forecast, outside_event


def check(run_config: Mapping[str, Any]) -> None:
    """Read the data and construct the server's objects from the settings.

    Raises:
        ValueError: naming the invalid setting.
    """
    run = ParsedRunConfig.of(run_config)
    training_of(run.settings)
    run.task()
    run.strategy(sizes_of(run_config))


def cost(run_config: Mapping[str, Any], *, own_model: bool = False) -> PrivacyStatement:
    """Return the statement that a run of these settings will end with.

    Args:
        run_config: settings of the run.
        own_model: whether the app has a user's own model and data (`flower_dp.app`).

    Raises:
        ValueError: naming the invalid setting; or if the cost depends on the numbers of records, and they cannot be read.
    """
    return forecast(**_planned(run_config, own_model=own_model))


def outside(run_config: Mapping[str, Any], *, own_model: bool = False) -> tuple[dp_events.DpEvent, PrivacyStatement]:
    """Return the event that these settings charge against outsiders, and the run's statement.

    Raises:
        ValueError: if every device has its own ledger; or as `cost`.
    """
    return outside_event(**_planned(run_config, own_model=own_model))


def public_test(run_config: Mapping[str, Any]) -> PublicTest:
    """Return the model, its loss and the public test records of a run.

    Raises:
        ValueError: naming the invalid setting, or if the records cannot be read.
    """
    run = ParsedRunConfig.of(run_config)
    records = records_to_test_with(run, config_of(run_config))
    return PublicTest(module=run.model(), loss=loss_of(run.settings.model), records=records)


def _planned(run_config: Mapping[str, Any], *, own_model: bool) -> dict[str, Any]:
    run = ParsedRunConfig.of(run_config, own_model=own_model)

    def unknown() -> dict[str, int]:
        why = "epsilon depends on each client's number of records, which this command does not read; start the run"
        raise ValueError(f"method={run.settings.method}: {why}")

    strategy = run.strategy(unknown if own_model else sizes_of(run_config))
    return {"strategy": strategy, "num_rounds": run.settings.num_rounds, "names": run.settings.client_names()}
