"""The task fashion-mnist: MNIST's format, but other files."""

import os

import numpy as np
import pytest

from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.fashion_mnist import Own, load

FULL = os.environ.get("FLOWER_DP_TEST_DATA", "")
needs_mnist = pytest.mark.skipif(not FULL, reason="FLOWER_DP_TEST_DATA does not name a folder with MNIST/raw")


def write(folder, train_labels, test_labels):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, labels in (("train", train_labels), ("t10k", test_labels)):
        for kind, array in (
            ("images-idx3", rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)),
            ("labels-idx1", np.array(labels, dtype=np.uint8)),
        ):
            header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())


def test_torchvisions_layout(tmp_path):
    write(tmp_path / "FashionMNIST" / "raw", list(range(10)) * 3, range(10))
    task = load(str(tmp_path), Own())
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((30, 28, 28), (10, 28, 28))
    assert task.train_labels.tolist() == list(range(10)) * 3
    assert task.source == f"Fashion-MNIST idx files in {tmp_path}"


def test_files_of_mnist_are_refused(tmp_path):
    write(tmp_path / "flat", [*range(10), 1], range(10))
    with pytest.raises(ValueError, match=r"the labels of train are 1 to 2 of a class.*are these the files of MNIST"):
        load(str(tmp_path / "flat"), Own())


@needs_mnist
def test_real_files_of_mnist_are_refused():
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\[\.gz\] is neither in"):
        load(FULL, Own())
    with pytest.raises(ValueError, match="the labels of train are 5421 to 6742 of a class"):
        load(f"{FULL}/MNIST/raw", Own())


@pytest.mark.parametrize("data_dir", ["", "/here/NEEDED"])
def test_missing_files_are_told_with_their_source(data_dir):
    with pytest.raises(ValueError, match=r"needs its four idx files.*https://github\.com/zalandoresearch/fashion-mnist"):
        load_task("fashion-mnist", data_dir)


def test_a_folder_without_the_files(tmp_path):
    with pytest.raises(ValueError, match=r"nor in its FashionMNIST/raw; must be a folder with Fashion-MNIST's idx files"):
        load(str(tmp_path), Own())
