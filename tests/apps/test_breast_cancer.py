"""The task breast-cancer: scikit-learn's records, without any download."""

import sys
import zlib

import numpy as np
import pytest

from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.breast_cancer import Own, load


@pytest.mark.slow
def test_the_split_is_stratified_and_fixed():
    task = load_task("breast-cancer")
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((456, 30), (113, 30))
    # A fifth of 212 malignant and 357 benign records, rounded down.
    assert np.bincount(task.test_labels).tolist() == [42, 71]
    assert np.bincount(task.train_labels).tolist() == [170, 286]
    assert np.count_nonzero(np.diff(task.train_labels)) > 100  # shuffled, not by class
    # Results are only comparable while the test set stays the same: this number must never change.
    assert zlib.crc32(task.test_labels.tobytes()) == 676885040


def test_features_are_scaled_by_the_published_ranges():
    from sklearn.datasets import load_breast_cancer

    task, raw = load_task("breast-cancer"), load_breast_cancer()
    inputs = np.concatenate([task.train_inputs, task.test_inputs])
    # The description's ranges are rounded.
    assert inputs.min(0) == pytest.approx(-np.ones(30), abs=0.05)
    assert inputs.max(0) == pytest.approx(np.ones(30), abs=0.05)
    # Smoothness (mean) 0.1184, the first record's; the smallest in the data is 0.05263, and the largest 0.1634.
    assert raw.data[0, 4] == 0.1184
    assert np.isclose(inputs[:, 4], 2 * (0.1184 - 0.053) / (0.163 - 0.053) - 1, atol=1e-6).any()
    order, ours = np.argsort(raw.data[:, 3]), np.concatenate([task.train_labels, task.test_labels])[np.argsort(inputs[:, 3])]
    assert np.mean(raw.target[order] == ours) > 0.98  # but for ties


def test_a_folder_is_refused():
    with pytest.raises(ValueError, match="data-dir='/data': must be '' for task='breast-cancer'"):
        load("/data", Own())


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"needs scikit-learn \(pip install 'flower-dp\[app\]'\)"):
        load("", Own())
