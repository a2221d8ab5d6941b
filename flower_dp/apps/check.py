"""The check of a run-config that `flower-dp run` calls before it starts Flower."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.client_parts import training_of
from flower_dp.apps.methods import Run
from flower_dp.apps.records import config_of, deal


def check(run_config: Mapping[str, Any]) -> None:
    """Read the data, and construct the server's objects from the settings.

    Raises:
        ValueError: naming the invalid setting.
    """
    run = Run.of(run_config)
    training_of(run.settings)
    run.task()
    run.strategy(lambda: {name: len(records) for name, records in deal(config_of(run_config)).clients.items()})
