"""What `flower-dp run` asks before it starts Flower: whether a run-config makes sense."""

from collections.abc import Mapping
from typing import Any

from apps.client_app import all_records
from apps.methods import Run
from apps.parts import training_of
from apps.tasks import load_task


def check(run_config: Mapping[str, Any]) -> None:
    """Read the data, and make what the server makes of the settings.

    Raises:
        ValueError: naming the setting that makes no sense.
    """
    run = Run.of(run_config)
    training_of(run.settings)
    load_task(run.settings.task, run.settings.data_dir)
    run.strategy(lambda: {name: len(records) for name, records in all_records(tuple(sorted(run_config.items())))[1].items()})
