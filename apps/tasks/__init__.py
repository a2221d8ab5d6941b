"""What is learned: a task's data, the models for it, and how its records are dealt to clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from apps.tasks import mnist


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The records of a task, as NumPy arrays that all callers in a process share: do not write to them.

    Attributes:
        name: The task's name.
        train_images: uint8 [n, 28, 28]; these are the records that clients hold.
        train_labels: int64 [n].
        test_images: uint8 [m, 28, 28]; the server's own, public test set.
        test_labels: int64 [m].
        source: Where the records came from, in words.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str


@cache
def load_task(name: str, data_dir: str = "") -> Task:
    """Load a task's data, once per process for each (name, data_dir).

    Args:
        name: One of `TASKS`.
        data_dir: The run-config key `data-dir`; for "mnist" see `apps.tasks.mnist.load`.

    Raises:
        ValueError: If the name is unknown or the data cannot be read.
    """
    if name not in _LOADERS:
        raise ValueError(f"task={name!r}: must be one of {', '.join(TASKS)}")
    digits = _LOADERS[name](data_dir)
    return Task(
        name=name,
        train_images=digits.train_images,
        train_labels=digits.train_labels,
        test_images=digits.test_images,
        test_labels=digits.test_labels,
        source=digits.source,
    )


_LOADERS: dict[str, Callable[[str], mnist.Digits]] = {"mnist": mnist.load}

TASKS = tuple(_LOADERS)
