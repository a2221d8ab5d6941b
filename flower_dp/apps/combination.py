"""Settings of a task, and a preset of one method with another."""

from collections.abc import Callable, Mapping
from typing import Any

from flower_dp.apps.settings import SAMPLED, key_of
from flower_dp.apps.tasks import TASKS, module_of
from flower_dp.methods import METHODS, TRAINING

_SAMPLING = ("sampling", "sampling-rate", "cohort-size")
_STEPS = ("learning-rate", "learning-rate-decay")


def of_task(name: str) -> dict[str, Any] | None:
    """Return the settings that a task needs, by key; None if it is no task."""
    return {"task": name, **module_of(name).NEEDS} if name in TASKS else None


def unread(method: str | None, sampling: str | None) -> Callable[[str], bool]:
    """Return whether a setting is read by other methods or samplings alone; None or a name that is not known reads all."""
    others: tuple[str, ...] = ()
    dropped: set[str] = set()
    if method is not None and method in METHODS:
        others = tuple(f"{other}." for other in METHODS if other != method)
        dropped = {key_of(one) for one in TRAINING if one not in METHODS[method].reads}
    dropped |= {key_of(name) for name, readers in SAMPLED.items() if sampling and sampling not in readers}
    return lambda key: key in dropped or key.startswith(others)


def with_method(preset: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a preset's settings with another method: those of the task, and of the others what that method reads.

    The sampling stays if the method can account for it, the step size if the method trains as the preset's does.

    Example:
        >>> from flower_dp.apps.combination import with_method
        >>> preset = {"method": "dp-fedavg", "task": "mnist", "momentum": 0.9, "batch-size": 8, "dp-fedavg.clip-norm": 1.0}
        >>> with_method(preset, "dp-fedpaq")
        {'method': 'dp-fedpaq', 'task': 'mnist', 'batch-size': 8}
    """
    if name not in METHODS or preset["method"] not in METHODS:
        return {**preset, "method": name}  # which is refused when it is read
    before, after = METHODS[preset["method"]], METHODS[name]
    sampling = preset.get("sampling") or before.samplings[0]
    dropped = {key_of(one) for one in TRAINING if one not in after.reads}
    if sampling not in after.samplings:
        dropped |= set(_SAMPLING)
    if before.reads != after.reads:
        dropped |= set(_STEPS)
    others = tuple(f"{other}." for other in METHODS if other != name)
    kept = {key: value for key, value in preset.items() if key not in dropped and not key.startswith(others)}
    explicit = {"sampling": sampling} if set(_SAMPLING) & kept.keys() else {}
    return {**kept, **explicit, "method": name}
