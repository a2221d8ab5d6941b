"""The task vehicle: what is read of its file, what is refused, and a run of its linear SVM."""

import json

import numpy as np
import pytest

from flower_dp.apps.records import config_of, deal
from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.vehicle import Own, load
from tests.app_runs import DEFAULTS, PRESETS, play


def content(sizes=(20, 12, 30)):
    """A data set in the file's format, which one direction separates."""
    rng = np.random.default_rng(0)
    users = [f"f_{number:05d}" for number in range(len(sizes))]
    data = {}
    for user, size in zip(users, sizes, strict=True):
        labels = rng.permutation(np.arange(size) % 2) * 2 - 1
        features = rng.normal(size=(size, 100)) + labels[:, None]
        data[user] = {"x": features.tolist(), "y": labels[:, None].tolist()}
    return {"num_samples": list(sizes), "users": users, "user_data": data}


@pytest.fixture
def folder(tmp_path):
    def made(values):
        (tmp_path / "vehicle.json").write_text(values if isinstance(values, str) else json.dumps(values))
        return str(tmp_path)

    return made


def test_sensors_are_the_natural_clients(folder):
    values = content()
    task = load(folder(values), Own())
    assert task.train_inputs.shape == (62, 100)
    assert task.train_inputs.dtype == np.float32
    assert np.bincount(task.groups).tolist() == [20, 12, 30]
    assert task.train_inputs[20:32] == pytest.approx(np.array(values["user_data"]["f_00001"]["x"]), rel=1e-6)
    assert task.train_labels[20:32].tolist() == [label for (label,) in values["user_data"]["f_00001"]["y"]]
    assert task.test_inputs.shape == (0, 100)


def with_record(values, key, value):
    values["user_data"]["f_00001"][key][7] = value
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: "[1, 2", r"vehicle\.json: is not JSON: .*line 1"),
        (lambda v: {**v, "user_data": []}, "with the dict 'user_data'"),
        (lambda v: {**v, "users": ["a", "b", "c"]}, "must have equally many, with the same names"),
        (lambda v: {**v, "num_samples": [20, 12, 31]}, "f_00002: has 30 x and 30 y where num_samples says 31"),
        (lambda v: {**v, "user_data": {**v["user_data"], "f_00001": {"x": []}}}, "must have the lists 'x' and 'y'"),
        (lambda v: with_record(v, "x", [0.0] * 99), r"vehicle\.json, f_00001, record 7: x must be 100 finite numbers"),
        (lambda v: with_record(v, "x", [0.0] * 99 + [1e39]), "record 7: x must be 100 finite numbers"),  # infinite in float32
        (lambda v: with_record(v, "y", [0]), r"record 7: y is \[0\], must be -1 or 1"),
    ],
)
def test_a_file_of_another_format_is_named(folder, change, message):
    with pytest.raises(ValueError, match=message):
        load(folder(change(content())), Own())


def settings(data_dir, **changes):
    of_data = {"data-dir": data_dir, "num-clients": 3, "cohort-size": 3}
    return PRESETS["vehicle-fedsgd-dpc"] | of_data | {key.replace("_", "-"): value for key, value in changes.items()}


def test_a_run_learns_and_tells_that_held_out_records_are_public(folder, tmp_path):
    # Noise so small that the result does not hang on it.
    config = settings(folder(content()), num_rounds=10, learning_rate=0.05) | {"fedsgd-dpc.epsilon": 100.0}
    run = play(tmp_path / "run", config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    statement = json.loads((run / "statement.json").read_text())
    assert lines[0]["accuracy"] < 0.9
    assert (lines[-1]["accuracy"], lines[-1]["validation-accuracy"]) == (1.0, 1.0)
    assert 0 < lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["validation-loss"] > 0
    (answer,) = (arguments for arguments in statement["not_covered"] if "hold out" in arguments)
    assert "validation-ratio=0.1, test-ratio=0.1" in answer
    assert "taken as public" in answer


def test_the_server_needs_something_to_test_with(folder, tmp_path):
    with pytest.raises(ValueError, match=r"test-ratio=0\.0: task='vehicle' has no test set of its own"):
        play(tmp_path / "run", settings(folder(content()), test_ratio=0.0))
    assert not (tmp_path / "run").exists()


def test_each_sensor_keeps_its_own_records(folder):
    config = DEFAULTS | settings(folder(content()))
    task, dealt = load_task("vehicle", config["data-dir"]), deal(config_of(config))
    for device, records in enumerate(dealt.clients.values()):
        assert set(task.groups[records.indices.numpy()].tolist()) == {device}
    # 20, 12 and 30 records: 2, 1 and 3 for validation, and as many for tests.
    assert [len(records) for records in dealt.clients.values()] == [16, 10, 24]
    assert (len(dealt.validation), len(dealt.test)) == (6, 6)
