"""Adult: does a person earn more than 50,000 dollars? 32,561 + 16,281 records of the US census of 1994, from `data-dir`.

Categorical features are one-hot, with a column for "?" where it occurs: 102 columns. With `adult.features = "all"` six numbers
follow, each divided by the largest value that its field can hold. Categories and ranges are the published ones; nothing is
computed from the records.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_dp.apps.tasks import Task, files
from flower_dp.core import checks

MODELS = ("logistic", "mlp")
CLASSES = (0, 1)  # <=50K, >50K
NEEDS: dict[str, Any] = {"data-dir": files.NEEDED, "num-clients": 16, "partition": "natural"}

FEATURES = ("categorical", "all")
TRAIN, TEST = "adult.data", "adult.test"
_ADVICE = "adult.data and adult.test are in https://archive.ics.uci.edu/static/public/2/adult.zip"
# Checksums of the files at that address. Files with other checksums are read too, if they have the format.
_SHA256 = {
    TRAIN: "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    TEST: "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
_LABELS = {"<=50K": 0, ">50K": 1}

# The fields of a line in their order, without the label: categories, or the largest number.
_FIELDS: dict[str, str | float] = {
    "age": 100,
    "workclass": "Private|Self-emp-not-inc|Self-emp-inc|Federal-gov|Local-gov|State-gov|Without-pay|Never-worked|?",
    "fnlwgt": 1_500_000,
    "education": "Bachelors|Some-college|11th|HS-grad|Prof-school|Assoc-acdm|Assoc-voc|9th|7th-8th|12th|Masters|1st-4th|10th|"
    "Doctorate|5th-6th|Preschool",
    "education-num": 16,
    "marital-status": "Married-civ-spouse|Divorced|Never-married|Separated|Widowed|Married-spouse-absent|Married-AF-spouse",
    "occupation": "Tech-support|Craft-repair|Other-service|Sales|Exec-managerial|Prof-specialty|Handlers-cleaners|"
    "Machine-op-inspct|Adm-clerical|Farming-fishing|Transport-moving|Priv-house-serv|Protective-serv|Armed-Forces|?",
    "relationship": "Wife|Own-child|Husband|Not-in-family|Other-relative|Unmarried",
    "race": "White|Asian-Pac-Islander|Amer-Indian-Eskimo|Other|Black",
    "sex": "Female|Male",
    "capital-gain": 99_999,
    "capital-loss": 5_000,
    "hours-per-week": 99,
    "native-country": "United-States|Cambodia|England|Puerto-Rico|Canada|Germany|Outlying-US(Guam-USVI-etc)|India|Japan|Greece|"
    "South|China|Cuba|Iran|Honduras|Philippines|Italy|Poland|Jamaica|Vietnam|Mexico|Portugal|Ireland|France|Dominican-Republic|"
    "Laos|Ecuador|Taiwan|Haiti|Columbia|Hungary|Guatemala|Nicaragua|Scotland|Thailand|Yugoslavia|El-Salvador|Trinadad&Tobago|"
    "Peru|Hong|Holand-Netherlands|?",
}
_CATEGORIES = {
    name: {category: number for number, category in enumerate(field.split("|"))}
    for name, field in _FIELDS.items()
    if isinstance(field, str)
}
_LARGEST = {name: field for name, field in _FIELDS.items() if not isinstance(field, str)}
_NUM_COLUMNS = sum(map(len, _CATEGORIES.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `adult`."""

    features: str = "categorical"

    def __post_init__(self) -> None:
        checks.one_of("adult.features", self.features, FEATURES)


def num_features(own: Own) -> int:
    """Return the number of columns."""
    return _NUM_COLUMNS + (len(_LARGEST) if own.features == "all" else 0)


def load(data_dir: str, own: Own) -> Task:
    """Load the records; the natural clients are the 16 levels of education, in the order of the documentation of the data.

    Args:
        data_dir: folder with `adult.data` and `adult.test`, in it or in its subfolder `adult`.
        own: the task's settings, which select the features.

    Raises:
        ValueError: if a file is missing, with where to get it; or if a line is invalid, naming file and line.
    """
    paths = [files.find(data_dir, task="adult", name=name, advice=_ADVICE) for name in (TRAIN, TEST)]
    (train, train_numbers, train_labels), (test, test_numbers, test_labels) = map(_read, paths)
    same = all(hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256[path.name] for path in paths)
    numbers = own.features == "all"
    return Task(
        name="adult",
        train_inputs=_columns(train, train_numbers if numbers else None),
        train_labels=train_labels,
        test_inputs=_columns(test, test_numbers if numbers else None),
        test_labels=test_labels,
        source=f"UCI Adult in {paths[0].parent.absolute()}, {'the published files' if same else 'NOT the published files'}",
        groups=train[:, list(_CATEGORIES).index("education")].copy(),
    )


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return categories int64 [n, 8], numbers float32 [n, 6] from 0 to 1, and labels int64 [n]."""
    rows = [
        _row(line, f"{path}, line {place}")
        for place, line in enumerate(files.read_text(path).splitlines(), start=1)
        # The published test file begins with a comment, and both end with an empty line.
        if line.strip() and not (place == 1 and line.startswith("|"))
    ]
    if not rows:
        raise ValueError(f"{path}: has no records")
    categories, numbers, labels = zip(*rows, strict=True)
    scaled = np.asarray(numbers, dtype=np.float64) / list(_LARGEST.values())
    return np.asarray(categories, dtype=np.int64), scaled.astype(np.float32), np.asarray(labels, dtype=np.int64)


def _row(line: str, place: str) -> tuple[list[int], list[int], int]:
    """Return the numbers of the categories, the numbers, and the label."""
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(_FIELDS) + 1:
        raise ValueError(f"{place}: has {len(values)} fields, must have {len(_FIELDS) + 1}")
    categories, numbers = [], []
    for name, value in zip(_FIELDS, values, strict=False):
        if name in _CATEGORIES:
            if value not in _CATEGORIES[name]:
                raise ValueError(f"{place}: {name}={value!r}: must be one of {', '.join(_CATEGORIES[name])}")
            categories.append(_CATEGORIES[name][value])
        else:
            if not (value.isascii() and value.isdigit() and int(value) <= _LARGEST[name]):
                raise ValueError(f"{place}: {name}={value!r}: must be a whole number from 0 to {_LARGEST[name]}")
            numbers.append(int(value))
    label = values[-1].removesuffix(".")  # labels of the test file end with a dot
    if label not in _LABELS:
        raise ValueError(f"{place}: the label is {values[-1]!r}, must be <=50K or >50K")
    return categories, numbers, _LABELS[label]


def _columns(categories: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
    """Return float32 [n, columns]: a one for each category, then the numbers."""
    sizes = [len(values) for values in _CATEGORIES.values()]
    columns = np.zeros((len(categories), sum(sizes)), dtype=np.float32)
    starts = np.cumsum([0, *sizes[:-1]])
    np.put_along_axis(columns, categories + starts, 1.0, axis=1)
    return columns if numbers is None else np.hstack([columns, numbers])
