import gzip
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from flower_dp.apps.tasks import fashion_mnist, load_task, mnist, vision


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write(folder, train_labels, test_labels):
    """Write a tiny data set in MNIST's files; return the arrays in them by file name."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, labels in (("train", train_labels), ("t10k", test_labels)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = np.asarray(labels, dtype=np.uint8)
    for name, array in arrays.items():
        (folder / name).write_bytes(idx(array))
    return arrays


@pytest.fixture
def small_mnist(tmp_path):
    return tmp_path, write(tmp_path, [3, 1, 4, 1, 5, 9], [2, 6, 5])


def digits_of(data_dir):
    return mnist.load(data_dir, mnist.Own())


def arrays_of(digits):
    return digits.train_inputs, digits.train_labels, digits.test_inputs, digits.test_labels


def assert_holds(digits, arrays):
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(arrays_of(digits), arrays, strict=True))


# The embedded digits


def test_embedded_split_is_stratified_and_fixed():
    digits = digits_of("")
    assert digits.train_inputs.shape == (4000, 28, 28)
    assert digits.test_inputs.shape == (1000, 28, 28)
    assert np.bincount(digits.train_labels).tolist() == [400] * 10
    assert np.bincount(digits.test_labels).tolist() == [100] * 10
    assert np.count_nonzero(np.diff(digits.train_labels)) > 3000  # shuffled, not by class
    # Results are only comparable while the test set stays the same: this number must never change.
    assert zlib.crc32(digits.test_inputs.tobytes()) == 3984243225
    assert load_task("mnist", "") is load_task("mnist", "")


# Files


def test_flat_folder(small_mnist):
    folder, arrays = small_mnist
    digits = digits_of(str(folder))
    assert_holds(digits, arrays.values())
    assert str(folder) in digits.source


def test_torchvision_layout_gzipped_and_home(small_mnist, monkeypatch):
    folder, arrays = small_mnist
    raw = folder / "home" / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in arrays:
        (raw / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert_holds(digits_of("~/data"), arrays.values())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"\x00\x00\x0d\x03" + bytes(12), "not an idx file"),  # float values
        ("train-images-idx3-ubyte", idx(np.zeros((6, 28, 28)))[:-1], "holds 4703 values where its header says 4704"),
        ("train-images-idx3-ubyte", idx(np.zeros((6, 20, 20))), r"must be \(n, 28, 28\)"),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x03" + b"\xff" * 12, "holds 0 values where"),
        ("train-labels-idx1-ubyte", idx(np.zeros(5)), "for 6 images"),
        ("t10k-labels-idx1-ubyte", idx(np.array([1, 2, 10])), "holds the label 10"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx(np.zeros(3)), mtime=0)[:-4], "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(small_mnist, name, content, message):
    folder, _ = small_mnist
    (folder / name.removesuffix(".gz")).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        digits_of(str(folder))


def test_missing_files(small_mnist, tmp_path):
    folder, _ = small_mnist
    (folder / "t10k-images-idx3-ubyte").unlink()
    for data_dir, message in (
        (str(folder), r"data-dir=.*t10k-images-idx3-ubyte\[\.gz\] is neither in"),
        (str(tmp_path / "nowhere"), "data-dir=.*must be '' for the embedded digits"),
        ("torchvision:", "data-dir='torchvision:': must name a folder"),
        ("/anywhere/NEEDED", "data-dir: this preset needs the full MNIST: --set data-dir="),
    ):
        with pytest.raises(ValueError, match=message):
            digits_of(data_dir)


# torchvision


def test_download_is_for_missing_files_only(small_mnist, monkeypatch):
    folder, arrays = small_mnist

    class Downloads:
        class datasets:
            @staticmethod
            def MNIST(root, train, download):
                assert train
                assert download
                raw = Path(root) / "MNIST" / "raw"
                raw.mkdir(parents=True)
                for name in arrays:
                    shutil.copy(folder / name, raw)

    monkeypatch.setattr(vision, "import_torchvision", lambda: Downloads)
    assert_holds(digits_of(f"torchvision:{folder / 'new'}"), arrays.values())
    monkeypatch.setattr(vision, "import_torchvision", lambda: pytest.fail("the files are there"))
    assert_holds(digits_of(f"torchvision:{folder / 'new'}"), arrays.values())


def test_download_without_internet_or_torchvision(tmp_path, monkeypatch):
    import urllib.error
    import urllib.request

    def refuse(*_args, **_kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match=r"data-dir='torchvision:.*no route to host.*embedded digits"):
        digits_of(f"torchvision:{tmp_path}")

    def absent():
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr(vision, "import_torchvision", absent)
    with pytest.raises(ValueError, match=r"data-dir='torchvision:.*needs torchvision, in the build that fits torch here"):
        digits_of(f"torchvision:{tmp_path}")


def test_operators_are_declared_only_after_the_known_failure(monkeypatch):
    declared = []
    answers = [RuntimeError("operator torchvision::nms does not exist"), "module", RuntimeError("no operator roi_align")]

    def answer(name):
        result = answers.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(vision.importlib, "import_module", answer)
    monkeypatch.setattr(torch.library, "define", lambda name, _schema: declared.append(name))
    assert vision.import_torchvision() == "module"
    assert declared == ["torchvision::nms", "torchvision::qnms"]
    with pytest.raises(RuntimeError, match="roi_align"):
        vision.import_torchvision()
    assert len(declared) == 2


# Fashion-MNIST: MNIST's format, but other files


def test_files_of_fashion_mnist(tmp_path):
    write(tmp_path / "FashionMNIST" / "raw", list(range(10)) * 3, range(10))
    task = fashion_mnist.load(str(tmp_path), fashion_mnist.Own())
    assert task.train_labels.tolist() == list(range(10)) * 3
    assert task.source == f"Fashion-MNIST idx files in {tmp_path}"


def test_files_of_mnist_are_not_those_of_fashion_mnist(tmp_path):
    write(tmp_path, [*range(10), 1], range(10))
    with pytest.raises(ValueError, match=r"train has 1 to 2 images per class.*are these the files of MNIST"):
        fashion_mnist.load(str(tmp_path), fashion_mnist.Own())
    with pytest.raises(ValueError, match=r"needs its four idx files.*https://github\.com/zalandoresearch/fashion-mnist"):
        fashion_mnist.load("", fashion_mnist.Own())
    with pytest.raises(ValueError, match=r"nor in its FashionMNIST/raw; must be a folder with Fashion-MNIST's idx files"):
        fashion_mnist.load(str(tmp_path / "raw"), fashion_mnist.Own())


# The published files, where a folder has them

FULL = os.environ.get("FLOWER_DP_TEST_DATA", "")


@pytest.mark.skipif(not FULL, reason="FLOWER_DP_TEST_DATA does not name a folder with MNIST, vehicle and adult")
@pytest.mark.slow
def test_the_published_files():
    digits, sensors, adult = (load_task(name, FULL) for name in ("mnist", "vehicle", "adult"))
    # The class counts that MNIST is known by, and the mean of a pixel, as every tutorial normalizes with.
    assert np.bincount(digits.train_labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert digits.train_inputs.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    counts = np.bincount(sensors.groups)
    assert (len(counts), counts.min(), counts.max()) == (23, 7, 534)
    assert adult.source.endswith("adult, the published files")
    # The documentation's share of labels >50K in the whole set is 23.93 %, over 48,842 records.
    assert np.mean(np.concatenate([adult.train_labels, adult.test_labels])) == pytest.approx(0.2393, abs=5e-5)
    with pytest.raises(ValueError, match="the labels of train are 5421 to 6742 of a class"):
        fashion_mnist.load(f"{FULL}/MNIST/raw", fashion_mnist.Own())
