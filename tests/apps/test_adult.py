"""The task adult: what is read of its files, and what is refused."""

import numpy as np
import pytest

from flower_dp.apps.tasks.adult import Own, load, num_features

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
    assert task.source.endswith("NOT the published files")


def test_numbers_are_scaled_by_what_their_fields_can_hold(folder):
    """What is computed from all records, such as a mean, would be covered by no guarantee."""
    own = Own(features="all")
    task = load(str(folder), own)
    assert task.train_inputs.shape == (2, num_features(own)) == (2, 108)
    expected = [[0.39, 77516 / 1.5e6, 13 / 16, 2174 / 99999, 0, 40 / 99], [0.5, 1, 1 / 16, 0, 1, 1]]
    assert task.train_inputs[:, 102:] == pytest.approx(np.array(expected), rel=1e-6)
    assert np.array_equal(task.train_inputs[:, :102], load(str(folder), Own()).train_inputs)


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
