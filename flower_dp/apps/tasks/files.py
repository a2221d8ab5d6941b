"""Find a task's files in the folder `data-dir` or in its subfolder with the task's name. Nothing is downloaded."""

from pathlib import Path

import numpy as np

from flower_dp.core.checks import BadValue, refusal

# The value of data-dir in presets whose data no package carries.
NEEDED = "NEEDED"


def split(labels: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of training and test records; a fifth of each class 0, 1, ... is for tests.

    The split depends only on the labels and a fixed seed: the test set is public, and the same for all runs.
    """
    rng = np.random.default_rng(0)
    by_class = [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]
    test = rng.permutation(np.concatenate([rows[: len(rows) // 5] for rows in by_class]))
    train = rng.permutation(np.concatenate([rows[len(rows) // 5 :] for rows in by_class]))
    return train, test


def is_missing(data_dir: str) -> bool:
    """Return whether `data-dir` is empty or has the placeholder of presets."""
    return not data_dir or Path(data_dir).name == NEEDED  # `flower-dp run` makes paths absolute


def missing(why: str) -> BadValue:
    """Return the error that a task needs `data-dir`."""
    return BadValue("data-dir", f"data-dir: {why}")


def find(data_dir: str, *, task: str, name: str, advice: str) -> Path:
    """Return the path of one of a task's files.

    Args:
        data_dir: value of the run-config key `data-dir`. A leading `~` is the home directory.
        task: name of the task, and of a subfolder that may have the file.
        name: name of the file.
        advice: text that tells where to get the file.

    Raises:
        ValueError: if the file is missing, with the advice.
    """
    if is_missing(data_dir):
        raise missing(f"task={task!r} needs {name}: --set data-dir=FOLDER with that file; {advice}")
    folder = Path(data_dir).expanduser()
    for path in (folder / name, folder / task / name):
        if path.is_file():
            return path
    raise refusal("data-dir", data_dir, f"{name} is neither in {folder.absolute()} nor in its subfolder {task}; {advice}")


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        ValueError: if the file can't be read or is not text, naming it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
