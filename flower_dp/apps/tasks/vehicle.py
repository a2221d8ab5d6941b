"""Vehicle: which of two military vehicles drives past? Acoustic and seismic features of 23 sensors, from `data-dir`.

100 features per record, labels -1 and +1; a linear SVM with hinge loss. The features are used as in the file. In the published
file, each sensor's records were standardized by their own mean and deviation, which no guarantee covers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from flower_dp.apps.tasks import NoSettings, Task, files

MODELS = ("linear-svm",)
CLASSES = (-1, 1)
NEEDS: dict[str, Any] = {
    "data-dir": files.NEEDED,
    "model": "linear-svm",
    "num-clients": 23,
    "partition": "natural",
    "validation-ratio": 0.1,
    "test-ratio": 0.1,
}
Own = NoSettings

FILE = "vehicle.json"
_NUM_FEATURES = 100
_LARGEST = float(np.finfo(np.float32).max)
_ADVICE = (
    "it is a LEAF file (users, num_samples, user_data) such as mytrain.json of https://github.com/litian96/ditto, data/vehicle, "
    "saved under this name"
)


def num_features(own: NoSettings) -> int:
    """Return the number of features."""
    return _NUM_FEATURES


def load(data_dir: str, own: NoSettings) -> Task:
    """Load the records; the natural clients are the sensors, in the order of the file. There is no test set.

    Args:
        data_dir: folder with `vehicle.json`, in it or in its subfolder `vehicle`.
        own: no settings.

    Raises:
        ValueError: if the file is missing, with where to get it; or if its content is invalid, naming file, sensor and record.
    """
    path = files.find(data_dir, task="vehicle", name=FILE, advice=_ADVICE)
    sensors = [_sensor(path, name, content, count) for name, content, count in _users(path)]
    inputs = np.concatenate([features for features, _ in sensors])
    return Task(
        name="vehicle",
        train_inputs=inputs,
        train_labels=np.concatenate([labels for _, labels in sensors]),
        test_inputs=inputs[:0],
        test_labels=np.zeros(0, dtype=np.int64),
        source=f"{len(inputs)} records of {len(sensors)} sensors in {path.absolute()}",
        groups=np.repeat(np.arange(len(sensors)), [len(labels) for _, labels in sensors]),
    )


def _users(path: Path) -> list[tuple[str, Any, Any]]:
    """Return name, content and stated number of records of every sensor."""
    try:
        content = json.loads(files.read_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None  # says line and column
    wanted = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in wanted.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise ValueError(f"{path}: must be a JSON object with the {kind.__name__} {key!r}")
    users, counts, data = (content[key] for key in wanted)
    if not users or len(users) != len(counts) or sorted(map(str, users)) != sorted(data):
        sizes = f"{len(users)} users, {len(counts)} num_samples, {len(data)} user_data"
        raise ValueError(f"{path}: has {sizes}; must have equally many, with the same names")
    return [(user, data[user], count) for user, count in zip(users, counts, strict=True)]


def _sensor(path: Path, name: str, content: Any, count: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return one sensor's features float32 [n, 100] and labels int64 [n]."""
    place = f"{path}, {name}"
    if not isinstance(content, dict) or not isinstance(content.get("x"), list) or not isinstance(content.get("y"), list):
        raise ValueError(f"{place}: must have the lists 'x' and 'y'")
    if not len(content["x"]) == len(content["y"]) == count or count == 0:
        raise ValueError(f"{place}: has {len(content['x'])} x and {len(content['y'])} y where num_samples says {count!r}")
    for record, (features, label) in enumerate(zip(content["x"], content["y"], strict=True)):
        if not isinstance(features, list) or len(features) != _NUM_FEATURES or not all(map(_is_number, features)):
            raise ValueError(f"{place}, record {record}: x must be {_NUM_FEATURES} finite numbers")
        if (label[0] if isinstance(label, list) and len(label) == 1 else label) not in CLASSES:
            raise ValueError(f"{place}, record {record}: y is {label!r}, must be -1 or 1")
    return np.asarray(content["x"], dtype=np.float32), np.asarray(content["y"]).astype(np.int64).reshape(-1)


def _is_number(value: Any) -> bool:
    # The limit is float32's: a larger number would become infinite.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
