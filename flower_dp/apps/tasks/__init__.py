"""The tasks of the app: one module each, found by its name, with its own table of settings.

A module `breast_cancer` is the task `breast-cancer` and the table `[tool.flwr.app.config.breast-cancer]`. It has the members of
`TaskModule`: data, models, and natural clients if there are any. The other modules of this folder are shared by tasks.
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
        name: The task's name.
        train_inputs: [n, ...]; these are the records that clients hold.
        train_labels: int64 [n], each one of the task's `CLASSES`.
        test_inputs: [m, ...], the server's own, public test set; m is 0 where the task has none.
        test_labels: int64 [m].
        source: Where the records came from, in words.
        groups: int64 [n], the number of the device that each training record comes from, from 0 on without gaps; None
            where the data name no devices.
        prepare: Turns a batch of inputs into the models' inputs; None if they need no change. Nothing in it may be computed from
            the records: no guarantee would cover it.
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
        Own: the dataclass of its own settings, with their defaults.
        MODELS: the models (`flower_dp.apps.tasks.models`) that fit it.
        CLASSES: the values of its labels, ascending.
        NEEDS: settings with which `flower-dp run TASK` runs it, by key, but for its data.
    """

    Own: type[Any]
    MODELS: tuple[str, ...]
    CLASSES: tuple[int, ...]
    NEEDS: dict[str, Any]

    def num_features(self, own: Any) -> int:
        """Return how many numbers a record has for the model."""

    def load(self, data_dir: str, own: Any) -> Task:
        """Return the records; `data_dir` is the run-config key `data-dir`.

        Raises:
            ValueError: if the data cannot be read, naming the file, or what is missing and where to get it.
        """


def module_of(name: str) -> TaskModule:
    """Return a task's module.

    Raises:
        ValueError: If there is no such task.
    """
    checks.one_of("task", name, TASKS)
    module: Any = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return module  # type: ignore[no-any-return]


@cache
def load_task(name: str, data_dir: str = "", own: Any = None) -> Task:
    """Load a task's data, once per process for each (name, data_dir, own).

    Args:
        name: One of `TASKS`.
        data_dir: The run-config key `data-dir`.
        own: The task's own settings, an instance of its `Own`; None for the defaults.

    Raises:
        ValueError: If the name is unknown or the data cannot be read.
    """
    module = module_of(name)
    return module.load(data_dir, module.Own() if own is None else own)
