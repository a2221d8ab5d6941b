import gzip
import os
import shutil
import tomllib
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from flower_dp.apps.tasks import load_task, mnist, vision

FULL = os.environ.get("FLOWER_DP_TEST_DATA", "")
needs_full = pytest.mark.skipif(not FULL, reason="FLOWER_DP_TEST_DATA does not name a folder with MNIST/raw")


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def small_mnist(tmp_path):
    """Folder with a tiny data set in MNIST's files, and the arrays in them by file name."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (6, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": rng.integers(0, 10, 6, dtype=np.uint8),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (3, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": rng.integers(0, 10, 3, dtype=np.uint8),
    }
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(idx(array))
    return tmp_path, arrays


def digits_of(data_dir):
    return mnist.load(data_dir, mnist.Own())


def arrays_of(digits):
    return digits.train_inputs, digits.train_labels, digits.test_inputs, digits.test_labels


@pytest.fixture(scope="module")
def embedded():
    return digits_of("")


def assert_holds(digits, arrays):
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(arrays_of(digits), arrays, strict=True))


# The embedded digits


def test_embedded_split_is_stratified(embedded):
    digits = embedded
    assert digits.train_inputs.shape == (4000, 28, 28)
    assert digits.test_inputs.shape == (1000, 28, 28)
    assert digits.train_inputs.dtype == digits.test_inputs.dtype == np.uint8
    assert digits.train_labels.dtype == digits.test_labels.dtype == np.int64
    assert np.bincount(digits.train_labels).tolist() == [400] * 10
    assert np.bincount(digits.test_labels).tolist() == [100] * 10
    assert np.count_nonzero(np.diff(digits.train_labels)) > 3000  # shuffled, not by class
    assert load_task("mnist", "") is load_task("mnist", "")


def test_embedded_split_is_fixed(embedded):
    assert_holds(digits_of(""), arrays_of(embedded))
    # Results are only comparable while the test set stays the same: this number must never change.
    assert zlib.crc32(embedded.test_inputs.tobytes()) == 3984243225


# Files


@needs_full
def test_full_mnist():
    digits = digits_of(FULL)
    assert digits.train_inputs.shape == (60_000, 28, 28)
    assert digits.test_inputs.shape == (10_000, 28, 28)
    # The class counts that MNIST is known by.
    assert np.bincount(digits.train_labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(digits.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # Mean and standard deviation of a pixel, as every MNIST tutorial normalises with.
    assert digits.train_inputs.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert digits.train_inputs.std() / 255 == pytest.approx(0.3081, abs=5e-5)


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
    with pytest.raises(ValueError, match=r"data-dir=.*t10k-images-idx3-ubyte\[\.gz\] is neither in"):
        digits_of(str(folder))
    with pytest.raises(ValueError, match=r"data-dir=.*must be '' for the embedded digits"):
        digits_of(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="data-dir='torchvision:': must name a folder"):
        digits_of("torchvision:")


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


def test_download_without_internet(tmp_path, monkeypatch):
    import urllib.error
    import urllib.request

    def refuse(*_args, **_kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match=r"data-dir='torchvision:.*no route to host.*embedded digits"):
        digits_of(f"torchvision:{tmp_path}")


def test_download_without_torchvision(tmp_path, monkeypatch):
    def absent():
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr(vision, "import_torchvision", absent)
    with pytest.raises(ValueError, match=r"data-dir='torchvision:.*needs torchvision, in the build that fits torch here"):
        digits_of(f"torchvision:{tmp_path}")


def test_operators_are_declared_only_after_the_known_failure(monkeypatch):
    declared, answers = [], [RuntimeError("operator torchvision::nms does not exist"), "module"]

    def answer(name):
        assert name == "torchvision"
        result = answers.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(vision.importlib, "import_module", answer)
    monkeypatch.setattr(torch.library, "define", lambda name, _schema: declared.append(name))
    assert vision.import_torchvision() == "module"
    assert declared == ["torchvision::nms", "torchvision::qnms"]
    declared.clear()
    answers[:] = ["module"]
    assert vision.import_torchvision() == "module"
    answers[:] = [RuntimeError("operator torchvision::roi_align does not exist")]
    with pytest.raises(RuntimeError, match="roi_align"):
        vision.import_torchvision()
    assert declared == []


# The dispatcher


def test_presets_of_the_full_data_ask_for_it():
    presets = list((Path(__file__).parents[2] / "flower_dp" / "apps" / "presets").glob("*full*.toml"))
    assert len(presets) == 5
    for path in presets:
        with pytest.raises(ValueError, match="data-dir: this preset needs the full MNIST: --set data-dir="):
            load_task("mnist", tomllib.loads(path.read_text())["data-dir"])
