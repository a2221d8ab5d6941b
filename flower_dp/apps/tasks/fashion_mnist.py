"""Fashion-MNIST: 60,000 + 10,000 pictures of clothes from a folder, in MNIST's format: 28 x 28 pixels, ten classes."""

from typing import Any

import numpy as np

from flower_dp.apps.tasks import NoSettings, Task, files, idx
from flower_dp.core.checks import refusal

MODELS = ("logistic", "mlp", "cnn", "cnn-small")
CLASSES = tuple(range(10))
NEEDS: dict[str, Any] = {"data-dir": files.NEEDED}
Own = NoSettings

_SOURCE = "https://github.com/zalandoresearch/fashion-mnist"
_FULL = idx.Collection(
    task="fashion-mnist",
    name="Fashion-MNIST",
    torchvision="FashionMNIST",
    prepare=idx.Standardize(mean=0.2860, std=0.3530),
)


def num_features(own: NoSettings) -> int:
    """Return the number of pixels."""
    return 784


def load(data_dir: str, own: NoSettings) -> Task:
    """Load the images.

    Args:
        data_dir: folder of the images (`idx.Collection.load`).
        own: no settings.

    Raises:
        ValueError: if the images cannot be read, or the classes differ in size: MNIST's files have the same names.
    """
    if files.is_missing(data_dir):
        wanted = f"--set data-dir=FOLDER with them (from {_SOURCE}), or data-dir=torchvision:FOLDER to download them there"
        raise files.missing(f"task='fashion-mnist' needs its four idx files: {wanted}")
    images = _FULL.load(data_dir)
    for part, labels in (("train", images.train_labels), ("t10k", images.test_labels)):
        counts = np.bincount(labels, minlength=len(CLASSES))
        if counts.min() != counts.max():
            why = f"{part} has {counts.min()} to {counts.max()} images per class, must have equally many"
            other = f"are these the files of MNIST? The files of Fashion-MNIST are at {_SOURCE}"
            raise refusal("data-dir", data_dir, f"{why}; {other}")
    return images
