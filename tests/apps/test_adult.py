"""The task adult: what is read of its files, and what is refused."""

import os

import numpy as np
import pytest

from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.adult import Own, load, num_features

FULL = os.environ.get("FLOWER_DP_TEST_DATA", "")
needs_full = pytest.mark.skipif(not FULL, reason="FLOWER_DP_TEST_DATA does not name a folder with adult/adult.data")

FIRST = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, United-States, <=50K"
SECOND = "50, ?, 1500000, Preschool, 1, Divorced, ?, Wife, Black, Female, 0, 5000, 99, ?, >50K"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adult.data").write_text(f"{FIRST}\n{SECOND}\n\n")
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{SECOND}.\n{FIRST}.\n\n")
    return tmp_path


def test_categories_are_one_hot(folder):
    task = load(str(folder), Own())
    assert task.train_inputs.shape == (2, 102)
    assert task.train_inputs.dtype == np.float32
    # State-gov, Bachelors, Never-married, Adm-clerical, Not-in-family, White, Male, United-States: places in adult.names,
    # behind 9, 16, 7, 15, 6, 5 and 2 columns of the features before.
    assert np.flatnonzero(task.train_inputs[0]).tolist() == [5, 9, 27, 40, 50, 53, 59, 60]
    assert np.flatnonzero(task.train_inputs[1]).tolist() == [8, 24, 26, 46, 47, 57, 58, 101]
    assert (task.train_inputs.sum(1) == 8).all()
    assert task.train_labels.tolist() == [0, 1]
    assert task.test_labels.tolist() == [1, 0]
    assert np.array_equal(task.test_inputs, task.train_inputs[::-1])
    assert task.groups.tolist() == [0, 15]


def test_numbers_are_scaled_by_what_their_fields_can_hold(folder):
    own = Own(features="all")
    task = load(str(folder), own)
    assert task.train_inputs.shape == (2, num_features(own)) == (2, 108)
    expected = [[0.39, 77516 / 1.5e6, 13 / 16, 2174 / 99999, 0, 40 / 99], [0.5, 1, 1 / 16, 0, 1, 1]]
    assert task.train_inputs[:, 102:] == pytest.approx(np.array(expected), rel=1e-6)
    assert np.array_equal(task.train_inputs[:, :102], load(str(folder), Own()).train_inputs)


def test_no_record_changes_another(folder):
    """What is computed from all records, such as a mean, would be covered by no guarantee."""
    before = load(str(folder), Own(features="all")).train_inputs
    (folder / "adult.data").write_text(f"{FIRST}\n{FIRST.replace('39,', '90,').replace('2174', '99999')}\n")
    assert np.array_equal(load(str(folder), Own(features="all")).train_inputs[0], before[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("State-gov", "Gov", "workclass='Gov': must be one of Private, "),
        ("39,", "39.5,", "age='39.5': must be a whole number from 0 to 100"),
        ("2174", "100000", "capital-gain='100000': must be a whole number from 0 to 99999"),
        ("<=50K", "50K", "the label is '50K', must be <=50K or >50K"),
        (", 40", "", "has 14 fields, must have 15"),
    ],
)
def test_a_bad_line_is_named(folder, old, new, message):
    (folder / "adult.data").write_text(f"{SECOND}\n{FIRST.replace(old, new)}\n")
    with pytest.raises(ValueError, match=rf"adult\.data, line 2: {message}"):
        load(str(folder), Own())


@pytest.mark.parametrize("data_dir", ["", "/here/NEEDED", "/nowhere"])
def test_missing_files_are_named_with_their_source(data_dir):
    with pytest.raises(ValueError, match=r"data-dir.*adult\.data.* https://archive\.ics\.uci\.edu/static/public/2/adult\.zip"):
        load(data_dir, Own())


def test_other_files_than_the_published_ones_are_told(folder):
    assert load(str(folder), Own()).source.endswith("NOT the published files")


@needs_full
@pytest.mark.slow
def test_the_published_files():
    task = load_task("adult", FULL)
    assert task.source.endswith("adult, the published files")
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((32_561, 102), (16_281, 102))
    # The documentation's share of labels >50K in the whole set is 23.93 %, over 48,842 records.
    assert np.mean(np.concatenate([task.train_labels, task.test_labels])) == pytest.approx(0.2393, abs=5e-5)
    # Of 16 devices by education the mean and the deviation are 2,035 and 2,911 records.
    counts = np.bincount(task.groups)
    assert len(counts) == 16
    assert round(counts.mean()) == 2035
    assert round(counts.std()) == 2911
    assert (counts.min(), counts.max()) == (51, 10_501)
    assert load_task("adult", FULL, Own(features="all")).train_inputs.shape == (32_561, 108)
