"""Which settings of a run-config nothing reads: `flower-dp compare` names none of them."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.evaluation import Evaluation
from flower_dp.apps.settings import SAMPLED, key_of
from flower_dp.apps.tasks import TASKS
from flower_dp.apps.tasks.partitions import WITH_CLASSES
from flower_dp.methods import METHODS, TRAINING


def made_unread(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the settings of one run-config that another one no longer reads, without those in the tables of other methods.

    An app's file may have the tables of several methods.

    Example:
        >>> from flower_dp.apps.unread import made_unread
        >>> before = {"method": "dp-fedavg", "blur-strength": 3.0, "blur-bound": 0.5}
        >>> made_unread(before, before | {"blur-strength": 0.0})
        {'blur-bound'}
    """
    found = unread(after) - unread(before)
    return {key for key in found if (table := key.partition(".")[0]) not in METHODS or table == after["method"]}


def unread(run_config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a run-config that its method, task, sampling and partition do not read.

    A key that flower-dp's app does not have is an app's own, and counts as read; so do all keys of a method that is not known.
    """
    method = str(run_config.get("method"))
    if method not in METHODS:
        return set()
    sampling = METHODS[method].samplings[0] if run_config.get("sampling") == "" else run_config.get("sampling")
    kinds = {"sampling": sampling, "partition": run_config.get("partition")}
    readers = {key_of(name): ("sampling", samplings) for name, samplings in SAMPLED.items()}
    readers |= {"dirichlet-alpha": ("partition", ("dirichlet",)), "classes-per-client": ("partition", WITH_CLASSES)}
    found = {key_of(name) for name in TRAINING if name not in METHODS[method].reads}
    found |= {key for key, (kind, values) in readers.items() if kinds[kind] is not None and kinds[kind] not in values}
    others = {*METHODS, *TASKS} - {method, run_config.get("task")}
    found |= {key for key in run_config if key.partition(".")[0] in others and "." in key}
    if not run_config.get("evaluation.every"):
        found |= {f"evaluation.{key_of(name)}" for name in Evaluation.__dataclass_fields__ if name != "every"}
    if not run_config.get("blur-strength"):
        found.add("blur-bound")
    if not run_config.get(f"{method}.clip-quantile"):
        adaptive = ("clip-learning-rate", "clip-count-noise-std", "smallest-clip-norm", "largest-clip-norm")
        found |= {f"{method}.{name}" for name in adaptive}
    if run_config.get("fed-smp.mask") != "top-k":
        found.add("fed-smp.random-ratio")
    return found & run_config.keys()
