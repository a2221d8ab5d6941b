"""Find the settings of a run-config that nothing reads, by its method, sampling, task and other settings."""

from collections.abc import Callable, Mapping
from typing import Any

from flower_dp.apps.settings import SAMPLED, SAMPLING_KEYS, Evaluation, key_of
from flower_dp.apps.tasks import TASKS
from flower_dp.apps.tasks.partitions import WITH_CLASSES
from flower_dp.methods import METHODS, TRAINING

_STEPS = ("learning-rate", "learning-rate-decay")
_ADAPTIVE = ("clip-learning-rate", "clip-count-noise-std", "min-clip-norm", "max-clip-norm")


def by_others(method: str | None, sampling: str | None) -> Callable[[str], bool]:
    """Return a function that tells whether only other methods or samplings read a setting.

    None or an unknown name reads all settings.
    """
    keys, tables = set(), list[str]()
    if method is not None and method in METHODS:
        keys = {key_of(name) for name in TRAINING if name not in METHODS[method].reads}
        tables = [f"{other}." for other in METHODS if other != method]
    keys |= {key_of(name) for name, readers in SAMPLED.items() if sampling and sampling not in readers}
    return lambda key: key in keys or key.startswith(tuple(tables))


def with_method(preset: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a preset's settings with another method: those of the task, and the others that this method reads.

    The sampling stays if the method can account for it. The step size stays if the method trains as the preset's method does.

    Example:
        >>> from flower_dp.apps.unread_settings import with_method
        >>> preset = {"method": "dp-fedavg", "task": "mnist", "momentum": 0.9, "batch-size": 8, "dp-fedavg.clip-norm": 1.0}
        >>> with_method(preset, "dp-fedpaq")
        {'method': 'dp-fedpaq', 'task': 'mnist', 'batch-size': 8}
    """
    if name not in METHODS or preset["method"] not in METHODS:
        return {**preset, "method": name}  # refused when it is read
    before, after = METHODS[preset["method"]], METHODS[name]
    sampling, unread_by = preset.get("sampling") or before.samplings[0], by_others(name, None)
    dropped = {*(SAMPLING_KEYS if sampling not in after.samplings else ()), *(_STEPS if before.reads != after.reads else ())}
    kept = {key: value for key, value in preset.items() if key not in dropped and not unread_by(key)}
    explicit = {"sampling": sampling} if set(SAMPLING_KEYS) & kept.keys() else {}
    return {**kept, **explicit, "method": name}


def made_unread(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the settings that `before` reads and `after` does not, without the tables of other methods.

    Those tables are left out because an app's file may have the tables of several methods.

    Example:
        >>> from flower_dp.apps.unread_settings import made_unread
        >>> before = {"method": "dp-fedavg", "blur-strength": 3.0, "blur-bound": 0.5}
        >>> made_unread(before, before | {"blur-strength": 0.0})
        {'blur-bound'}
    """
    keys = unread(after) - unread(before)
    return {key for key in keys if (table := key.partition(".")[0]) not in METHODS or table == after["method"]}


def unread(run_config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a run-config that its method, task, sampling and partition do not read.

    Keys that flower-dp's app does not have belong to another app and count as read. So do all keys of an unknown method.
    """
    method, task = str(run_config.get("method")), run_config.get("task")
    if method not in METHODS:
        return set()
    sampling = run_config.get("sampling")
    others = by_others(method, METHODS[method].samplings[0] if sampling == "" else sampling)
    partition = run_config.get("partition")
    read_beside = {
        "dirichlet-alpha": partition in (None, "dirichlet"),
        "classes-per-client": partition in (None, *WITH_CLASSES),
        "blur-bound": run_config.get("blur-strength"),
        "fed-smp.random-ratio": run_config.get("fed-smp.mask") == "top-k",
        **{f"{method}.{name}": run_config.get(f"{method}.clip-quantile") for name in _ADAPTIVE},
        **{
            f"private-evaluation.{key_of(name)}": run_config.get("private-evaluation.every")
            for name in Evaluation.__dataclass_fields__
        },
        "private-evaluation.every": True,
    }
    tables = tuple(f"{other}." for other in TASKS if other != task)
    return {key for key in run_config if others(key) or key.startswith(tables) or not read_beside.get(key, True)}
