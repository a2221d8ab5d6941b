"""CIFAR-10: 50,000 + 10,000 color pictures of 32 x 32 pixels in ten classes, read by torchvision from a folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_dp.apps.tasks import NoSettings, Task, files, vision
from flower_dp.apps.tasks.idx import DOWNLOAD_PREFIX, download_folder
from flower_dp.core.checks import BadValue, refusal

if TYPE_CHECKING:
    from torch import Tensor

MODELS = ("logistic", "mlp", "resnet18")
CLASSES = tuple(range(10))
NEEDS: dict[str, Any] = {"data-dir": files.NEEDED}
Own = NoSettings

_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
# Published mean and standard deviation of red, green and blue.
_MEANS, _STDS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def num_features(own: NoSettings) -> int:
    """Return the number of pixels times the number of colors."""
    return 3 * 32 * 32


def load(data_dir: str, own: NoSettings) -> Task:
    """Load the pictures.

    Args:
        data_dir: folder with torchvision's `cifar-10-batches-py`; or "torchvision:" and a folder, to which torchvision downloads
            it if it is missing. A leading `~` is the home directory.
        own: no settings.

    Raises:
        ValueError: if the files cannot be read or are not the published ones; torchvision unpickles only these.
    """
    if files.is_missing(data_dir):
        wanted = f"--set data-dir=FOLDER with it (from {_SOURCE}), or data-dir={DOWNLOAD_PREFIX}FOLDER to download it there"
        raise files.missing(f"task='cifar-10' needs cifar-10-batches-py: {wanted}")
    asked, root = data_dir.startswith(DOWNLOAD_PREFIX), download_folder(data_dir)
    train_inputs, train_labels = _read(root, data_dir, train=True, download=asked)
    test_inputs, test_labels = _read(root, data_dir, train=False, download=False)
    return Task(
        name="cifar-10",
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        source=f"CIFAR-10's cifar-10-batches-py in {root.absolute()}",
        prepare=standardized,
    )


def standardized(pictures: "Tensor") -> "Tensor":
    """Return uint8 pictures [..., 3, 32, 32] as float32 numbers, standardized by each color's published mean and deviation."""
    numbers = pictures.float()
    means, stds = (255 * numbers.new_tensor(of).view(3, 1, 1) for of in (_MEANS, _STDS))
    return (numbers - means) / stds


def _read(root: Path, data_dir: str, *, train: bool, download: bool) -> tuple[np.ndarray, np.ndarray]:
    try:
        dataset = vision.import_torchvision().datasets.CIFAR10(str(root), train=train, download=download)
    except ImportError as error:
        raise BadValue("task", f"task='cifar-10': {vision.NEEDED}") from error
    except (OSError, RuntimeError) as error:
        why = f"torchvision found no complete cifar-10-batches-py in {root.absolute()} ({' '.join(str(error).split())})"
        wanted = f"must be a folder with it (from {_SOURCE}), or '{DOWNLOAD_PREFIX}' and a folder to download to"
        raise refusal("data-dir", data_dir, f"{why}; {wanted}") from error
    # torchvision has the colors in the last dimension; torch's convolutions need them first.
    inputs = np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2))
    return inputs, np.asarray(dataset.targets, dtype=np.int64)
