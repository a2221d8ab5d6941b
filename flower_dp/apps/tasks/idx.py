"""Images in idx files, the format of MNIST and of data sets that adopted it."""

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flower_dp.apps.tasks import Task, vision
from flower_dp.core.checks import refusal

if TYPE_CHECKING:
    from torch import Tensor

DOWNLOAD_PREFIX = "torchvision:"

_NUM_CLASSES = 10
_IDX_UINT8 = 0x08
_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standardize:
    """Standardizes uint8 pixels to float32 by a published mean and standard deviation of pixels from 0 to 1."""

    mean: float
    std: float

    def __call__(self, images: "Tensor") -> "Tensor":
        """Return standardized images in the same shape."""
        return (images.float() - 255 * self.mean) / (255 * self.std)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A data set in idx files.

    Attributes:
        task: name of the task.
        name: name of the data set for readers.
        torchvision: name of the class in torchvision, and of the folder in torchvision's layout.
        prepare: standardization by a pixel's mean and deviation, as published with the data set's benchmarks.
        otherwise: other allowed values of `data-dir`, as text; may be empty.
    """

    task: str
    name: str
    torchvision: str
    prepare: Standardize
    otherwise: str = ""

    def load(self, data_dir: str) -> Task:
        """Load the images, uint8 [n, 28, 28] with 0 for the background, and labels from 0 to 9.

        Args:
            data_dir: folder with the idx files, plain or gzipped, in it or in its `<torchvision>/raw`; or "torchvision:" and a
                folder, to which torchvision downloads the files if they are missing. A leading `~` is the home directory.

        Raises:
            ValueError: if the folder lacks one of the four files, a file has other contents, or the download failed.
        """
        asked = data_dir.startswith(DOWNLOAD_PREFIX)
        folder = self._download(data_dir) if asked else Path(data_dir).expanduser()
        train_images, train_labels = self._read_pair(folder, _TRAIN, data_dir)
        test_images, test_labels = self._read_pair(folder, _TEST, data_dir)
        return Task(
            name=self.task,
            train_inputs=train_images,
            train_labels=train_labels,
            test_inputs=test_images,
            test_labels=test_labels,
            source=f"{self.name} idx files in {folder.absolute()}",
            prepare=self.prepare,
        )

    def _read_pair(self, folder: Path, names: tuple[str, str], data_dir: str) -> tuple[np.ndarray, np.ndarray]:
        images_path, labels_path = (self._find(folder, name, data_dir) for name in names)
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28):
            raise ValueError(f"{images_path}: holds an array of shape {images.shape}, must be (n, 28, 28)")
        if labels.shape != images.shape[:1] or len(labels) == 0:
            raise ValueError(f"{labels_path}: holds labels of shape {labels.shape} for {len(images)} images")
        if labels.max() >= _NUM_CLASSES:
            raise ValueError(f"{labels_path}: holds the label {labels.max()}, must be 0 to {_NUM_CLASSES - 1}")
        return images, labels.astype(np.int64)

    def _search(self, folder: Path, name: str) -> Path | None:
        places = (folder / self.torchvision / "raw", folder)
        paths = (place / file for place in places for file in (name, f"{name}.gz"))
        return next((path for path in paths if path.is_file()), None)

    def _find(self, folder: Path, name: str, data_dir: str) -> Path:
        path = self._search(folder, name)
        if path is None:
            why = f"{name}[.gz] is neither in {folder.absolute()} nor in its {self.torchvision}/raw"
            wanted = f"a folder with {self.name}'s idx files, or '{DOWNLOAD_PREFIX}' and a folder to download to"
            raise refusal("data-dir", data_dir, f"{why}; must be {self.otherwise}{wanted}")
        return path

    def _download(self, data_dir: str) -> Path:
        root = download_folder(data_dir)
        if all(self._search(root, name) for name in (*_TRAIN, *_TEST)):
            return root
        try:
            getattr(vision.import_torchvision().datasets, self.torchvision)(str(root), train=True, download=True)
        except ImportError as error:
            raise refusal("data-dir", data_dir, vision.NEEDED) from error
        except (OSError, RuntimeError) as error:
            why = f"torchvision could not download {self.name} ({' '.join(str(error).split())})"  # its text has many lines
            instead = f"without internet use {self.otherwise}a folder that has {self.name}'s idx files"
            raise refusal("data-dir", data_dir, f"{why}; {instead}") from error
        return root


def download_folder(data_dir: str) -> Path:
    """Return the folder that `data-dir` names, with or without the prefix for a download.

    Raises:
        BadValue: if `data-dir` names no folder.
    """
    folder = data_dir.removeprefix(DOWNLOAD_PREFIX)
    if not folder:
        raise refusal("data-dir", data_dir, f"must name a folder, as in '{DOWNLOAD_PREFIX}~/data'")
    return Path(folder).expanduser()


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped if its name ends in `.gz`.

    The format (Y. LeCun): two zero bytes, the type code, the number of dimensions, each dimension as a big-endian
    32-bit number, then the values.

    Returns:
        Array uint8, in the shape that the file states.

    Raises:
        ValueError: if the file has another format, is too short or too long, naming it.
    """
    try:
        # An array over a bytearray is writable; torch.from_numpy warns of arrays that are not.
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
