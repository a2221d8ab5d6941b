"""The tasks of the app: one module per task, named like it, with its own table of settings.

The module `breast_cancer` is the task `breast-cancer` and the table `[tool.flwr.app.config.breast-cancer]`. It has the members of
`TaskModule`. Tasks share the other modules of this folder.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flower_dp.core import checks

if TYPE_CHECKING:
    from torch import Tensor

TASKS = ("mnist", "fashion-mnist", "cifar-10", "adult", "vehicle", "breast-cancer")
MODELS = ("logistic", "mlp", "cnn", "cnn-small", "resnet18", "linear-svm")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """The records of a task, as NumPy arrays that all callers in a process share: do not write to them.

    Attributes:
        name: name of the task.
        train_inputs: inputs of the clients' records [n, ...].
        train_labels: labels int64 [n], each one of the task's `CLASSES`.
        test_inputs: inputs of the server's public test set [m, ...]; m is 0 if the task has none.
        test_labels: labels int64 [m].
        source: origin of the records, as text.
        groups: device numbers int64 [n], one per training record, from 0 without gaps; None if the data name no devices.
        prepare: function from a batch of inputs to the models' inputs; None for no change. Nothing in it may be computed from the
            records: no guarantee would cover it.
    """

    name: str
    train_inputs: np.ndarray
    train_labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    source: str
    groups: np.ndarray | None = None
    prepare: "Callable[[Tensor], Tensor] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSettings:
    """The table of a task without settings of its own."""


class TaskModule(Protocol):
    """The members of a task's module.

    Attributes:
        Own: dataclass of the task's own settings, with their defaults.
        MODELS: names of the models (`flower_dp.apps.tasks.models`) that fit the task.
        CLASSES: values of the labels, ascending.
        NEEDS: settings that `flower-dp run TASK` needs, by key, except the place of the data.
    """

    Own: type[Any]
    MODELS: tuple[str, ...]
    CLASSES: tuple[int, ...]
    NEEDS: dict[str, Any]

    def num_features(self, own: Any) -> int:
        """Return the number of features of a record."""

    def load(self, data_dir: str, own: Any) -> Task:
        """Return the records; `data_dir` is the run-config key `data-dir`.

        Raises:
            ValueError: if the data cannot be read, naming the file; or if it is missing, with where to get it.
        """


def module_of(name: str) -> TaskModule:
    """Return a task's module.

    Raises:
        ValueError: if the task does not exist.
    """
    checks.one_of("task", name, TASKS)
    module: Any = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return module  # type: ignore[no-any-return]


@cache
def load_task(name: str, data_dir: str = "", own: Any = None) -> Task:
    """Load a task's data, once per process for each (name, data_dir, own).

    Args:
        name: one of `TASKS`.
        data_dir: value of the run-config key `data-dir`.
        own: the task's own settings, an instance of its `Own`; None for the defaults.

    Raises:
        ValueError: if the name is unknown or the data cannot be read.
    """
    module = module_of(name)
    return module.load(data_dir, module.Own() if own is None else own)
