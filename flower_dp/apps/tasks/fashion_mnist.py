"""Fashion-MNIST: 60,000 + 10,000 pictures of clothes from a folder; MNIST's format, 28 x 28 pixels, ten classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_dp.apps.tasks import Task, files, idx

MODELS = ("logistic", "mlp", "cnn", "cnn-small")
CLASSES = tuple(range(10))
NEEDS: dict[str, Any] = {"data-dir": files.NEEDED}

_SOURCE = "https://github.com/zalandoresearch/fashion-mnist"
_FULL = idx.Collection(name="Fashion-MNIST", torchvision="FashionMNIST")


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """No settings of its own."""


def num_features(own: Own) -> int:
    """Return the number of pixels."""
    return 784


def load(data_dir: str, own: Own) -> Task:
    """Load the images.

    Args:
        data_dir: where they are (`idx.Collection.load`).
        own: nothing.

    Raises:
        ValueError: If they cannot be read, or are not evenly many of each class: MNIST's files have the same names.
    """
    if files.is_missing(data_dir):
        raise ValueError(
            f"data-dir: task='fashion-mnist' needs its four idx files: --set data-dir=FOLDER with them (from {_SOURCE}), or "
            "data-dir=torchvision:FOLDER to download them there"
        )
    images = _FULL.load(data_dir)
    for part, labels in (("train", images.train_labels), ("t10k", images.test_labels)):
        counts = np.bincount(labels, minlength=len(CLASSES))
        if counts.min() != counts.max():
            raise ValueError(
                f"data-dir={data_dir!r}: the labels of {part} are {counts.min()} to {counts.max()} of a class, but Fashion-MNIST "
                f"has equally many of each; are these the files of MNIST? Those of Fashion-MNIST are at {_SOURCE}"
            )
    return Task(
        name="fashion-mnist",
        train_inputs=images.train_images,
        train_labels=images.train_labels,
        test_inputs=images.test_images,
        test_labels=images.test_labels,
        source=images.source,
        # Mean and deviation of a pixel, as they are published with the data set's benchmarks.
        prepare=idx.Standardize(mean=0.2860, std=0.3530),
    )
