"""What `flower-dp run` asks before it starts Flower: whether a run-config makes sense."""

from collections.abc import Mapping
from typing import Any

from apps.methods import Run
from apps.parts import training_of
from apps.records import config_of, deal


def check(run_config: Mapping[str, Any]) -> None:
    """Read the data, and make what the server makes of the settings.

    Raises:
        ValueError: naming the setting that makes no sense.
    """
    run = Run.of(run_config)
    training_of(run.settings)
    run.task()
    run.strategy(lambda: {name: len(records) for name, records in deal(config_of(run_config)).clients.items()})
