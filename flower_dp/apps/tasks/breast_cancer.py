"""Breast cancer (Wisconsin, diagnostic): is a tumor malignant or benign? 569 records, 30 features, in scikit-learn.

For methods that protect records: a first run on real data without any download. Each feature is scaled to [-1, 1] by the range
that the data set's description publishes. Nothing is computed from the records.
"""

from typing import Any

import numpy as np

from flower_dp.apps.tasks import NoSettings, Task, files
from flower_dp.core.checks import bad

MODELS = ("logistic", "mlp")
CLASSES = (0, 1)  # malignant, benign
NEEDS: dict[str, Any] = {"num-clients": 10}
Own = NoSettings

# Of the description's summary statistics: smallest and largest value, for the means, standard errors and worst values of radius,
# texture, perimeter, area, smoothness, compactness, concavity, concave points, symmetry and fractal dimension.
_RANGES = (
    *((6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163)),
    *((0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097)),
    *((0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031)),
    *((0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03)),
    *((7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223)),
    *((0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208)),
)


def num_features(own: NoSettings) -> int:
    """Return the number of features."""
    return len(_RANGES)


def load(data_dir: str, own: NoSettings) -> Task:
    """Load the records, split into 456 for training and 113 for tests, with the same class proportions in both.

    Args:
        data_dir: "", since the records come with scikit-learn.
        own: no settings.

    Raises:
        ValueError: if `data_dir` is set, or scikit-learn is missing.
    """
    if data_dir:
        raise bad("data-dir", data_dir, "'' for task='breast-cancer', whose records come with scikit-learn")
    try:
        from sklearn.datasets import load_breast_cancer  # noqa: PLC0415 - takes a second
    except ImportError as error:
        raise ValueError("task='breast-cancer' needs scikit-learn (pip install 'flower-dp[app]')") from error
    table, labels = load_breast_cancer(return_X_y=True)
    lowest, highest = np.asarray(_RANGES).T
    inputs = ((2 * table - lowest - highest) / (highest - lowest)).astype(np.float32)
    labels = labels.astype(np.int64)
    train, test = files.split(labels, len(CLASSES))
    return Task(
        name="breast-cancer",
        train_inputs=inputs[train],
        train_labels=labels[train],
        test_inputs=inputs[test],
        test_labels=labels[test],
        source=f"{len(table)} records of Breast Cancer Wisconsin (diagnostic) in scikit-learn",
    )
