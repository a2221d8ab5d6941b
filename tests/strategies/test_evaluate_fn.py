"""A failing `evaluate_fn` is reported as such, and what its round has cost is stated."""

import json

import pytest
from flwr.app import MetricRecord

from flower_dp.clients import model_arrays
from flower_dp.core.sampling import FullSampling
from flower_dp.running.recorded import record_run
from flower_dp.running.run_folder import RunFolder
from flower_dp.strategies import DPFedAvg
from tests.grids import LocalGrid
from tests.local_grids import linear
from tests.stock import shifted, stock_app

ROUNDS = 3


def strategy():
    return DPFedAvg(clip_norm=1.0, noise_multiplier=1.0, sampling=FullSampling(), num_clients=4, delta=1e-3)


def grid():
    return LocalGrid(stock_app(shifted(lambda node: 0.1)), 4)


def failing_in(which):
    def evaluate(server_round, arrays):
        if server_round == which:
            raise KeyError("rmse")
        return MetricRecord({"rmse": float(server_round)})

    return evaluate


def test_a_failure_on_the_initial_model_ends_the_run_before_a_charge():
    made, nodes = strategy(), grid()
    with pytest.raises(RuntimeError, match="evaluate_fn failed on the initial model, before any charge: KeyError: 'rmse'"):
        made.start(nodes, model_arrays(linear()), num_rounds=ROUNDS, evaluate_fn=failing_in(0))
    assert made.epsilon == 0
    assert not nodes.received


def test_a_later_failure_names_the_round_and_leaves_its_charge_stated():
    made, whole = strategy(), strategy()
    whole.start(grid(), model_arrays(linear()), num_rounds=2)
    with pytest.raises(RuntimeError, match="evaluate_fn failed in round 2, whose cost is stated: KeyError: 'rmse'"):
        made.start(grid(), model_arrays(linear()), num_rounds=ROUNDS, evaluate_fn=failing_in(2))
    assert [report.server_round for report in made.rounds] == [1, 2]
    assert made.epsilon == whole.epsilon
    assert made.statement.num_rounds == 2
    assert made.state.model is not None


@pytest.mark.parametrize("returned", [(0.5, {"accuracy": 0.9}), 0.5, [0.5]])
def test_what_is_no_metrics_is_refused_by_name_before_a_charge(returned):
    made, nodes = strategy(), grid()
    with pytest.raises(RuntimeError, match=r"before any charge: TypeError: it returned a .*: must be a MetricRecord, a dict"):
        made.start(nodes, model_arrays(linear()), num_rounds=ROUNDS, evaluate_fn=lambda server_round, arrays: returned)
    assert made.epsilon == 0
    assert not nodes.received


def test_a_dict_of_numbers_is_taken_for_metrics():
    result = strategy().start(
        grid(), model_arrays(linear()), num_rounds=1, evaluate_fn=lambda server_round, arrays: {"rmse": 0.5 + server_round}
    )
    assert dict(result.evaluate_metrics_serverapp[1]) == {"rmse": 1.5}


@pytest.mark.parametrize("which", [0, 2])
def test_a_run_folder_has_every_round_that_was_charged(which, tmp_path):
    made, folder = strategy(), tmp_path / "run"
    with pytest.raises(RuntimeError, match="evaluate_fn failed") as raised:
        record_run(made, grid(), model_arrays(linear()), num_rounds=ROUNDS, config={}, path=folder, evaluate_fn=failing_in(which))
    assert str(raised.value).count("evaluate_fn failed") == 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(which + 1))
    assert ["rmse" in line for line in lines] == [True] * which + [False]
    assert lines[-1]["epsilon"] == made.epsilon


def test_a_folder_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    """It is no failure of the user's function."""

    def full(self, line):
        if line["round"] == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(RunFolder, "append", full)
    made = strategy()
    with pytest.raises(OSError, match="no space left"):
        record_run(made, grid(), model_arrays(linear()), num_rounds=ROUNDS, config={}, path=tmp_path / "run")
    assert len(made.rounds) == 2
