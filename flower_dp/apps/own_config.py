"""The run-config of an app around somebody's own model and data."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.device import DEALT, FUNCTIONS
from flower_dp.apps.methods import Run, defaults
from flower_dp.core import checks

# What flower-dp's own model and data are made from; `seed` is the first model's as well.
NOT_READ = ("model", "model-bias", *(key for key in DEALT if key != "seed"))


def run_of(run_config: Mapping[str, Any]) -> Run:
    """Return the settings of a run-config that may leave out what has a default.

    Raises:
        ValueError: as `Run.of`, and for settings of flower-dp's own models and data.
    """
    return Run.of({key: value for key, value in whole(run_config).items() if key not in FUNCTIONS})


def whole(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run-config with the defaults of what it leaves out.

    Raises:
        ValueError: for settings of flower-dp's own models and data.
    """
    known, findings = defaults(), checks.Findings()
    for key in NOT_READ:
        if run_config.get(key, known[key]) != known[key]:
            findings.lines.append(
                f"{key}={run_config[key]!r}: an app with its own model and data does not use this setting; remove it"
            )
    findings.refuse()
    return {**known, **run_config}
