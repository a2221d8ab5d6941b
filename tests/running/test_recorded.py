"""record_run: which columns of metrics.jsonl are the run's own, and what the folder says of a run that failed."""

import json
import logging

import numpy as np
import pytest
from flwr.app import MetricRecord

from flower_dp import record_run
from flower_dp.clients import FedSGDDPCRecipe, model_arrays
from flower_dp.core.sampling import PoissonSampling
from flower_dp.strategies import DPFedAvg, FedSGDDPC
from tests.grids import LocalGrid
from tests.local_grids import NAMES, grid_of, linear, records
from tests.stock import arrays, shifted, stock_app

LAPLACE = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 2.0}
# Columns that a run has in every line, in the lines of its rounds, in those of private evaluations, or keeps to itself.
OWN = ("round", "num-rounds", "epsilon", "delta", "elapsed", "seconds", "cohort-size", "replies", "bytes-up", "bytes-down")
OWN += ("bytes-per-client", "cost-per-device", "private-accuracy", "private-loss-standard-error", "client-update-norm")


def run(folder, evaluate_fn=None, **arguments):
    strategy = FedSGDDPC(**LAPLACE, num_clients=2, cohort_size=2, num_records=8, learning_rate=0.5)
    recipe = FedSGDDPCRecipe(**LAPLACE, num_replies=2)
    grid = grid_of(recipe, {name: records(name) for name in NAMES[:2]})
    record_run(strategy, grid, model_arrays(linear()), num_rounds=2, config={}, path=folder, evaluate_fn=evaluate_fn, **arguments)
    return strategy


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", OWN)
def test_no_metric_of_the_users_takes_the_place_of_a_column_of_the_run(name, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run(tmp_path / "run", lambda server_round, model: MetricRecord({name: -7.5, "accuracy": 0.25}))
    lines = lines_of(tmp_path / "run")
    assert [line["accuracy"] for line in lines] == [0.25, 0.25, 0.25]
    assert not any(line.get(name) == -7.5 for line in lines)
    assert [line["round"] for line in lines] == [0, 1, 2]
    answer = [entry.getMessage() for entry in caplog.records if "evaluate_fn" in entry.getMessage()]
    assert answer == [f"evaluate_fn: its metric {name!r} is not written: this is a column of the run's own; give it another name"]


def test_the_lines_have_the_runs_own_epsilon_and_delta(tmp_path):
    strategy = run(tmp_path / "run", lambda server_round, model: MetricRecord({"epsilon": 0.001, "delta": 1e-9}))
    lines = lines_of(tmp_path / "run")
    assert [line["epsilon"] for line in lines] == [0.0, *(report.epsilon for report in strategy.rounds)]
    assert lines[-1]["epsilon"] == pytest.approx(2.0)
    assert [line["delta"] for line in lines] == [0.0] * 3


def test_a_metric_does_not_stand_for_the_size_of_a_secret_cohort(tmp_path):
    sampling = PoissonSampling(sampling_rate=0.9)
    strategy = DPFedAvg(clip_norm=0.5, noise_multiplier=4.0, sampling=sampling, num_clients=4, delta=1e-3)
    grid = LocalGrid(stock_app(shifted(lambda node: 0.1)), 4)
    answer = {"cohort-size": 2.0, "replies": 2.0}
    record_run(
        strategy,
        grid,
        arrays(weight=np.zeros(3, np.float32)),
        num_rounds=1,
        config={},
        path=tmp_path / "run",
        evaluate_fn=lambda server_round, model: MetricRecord(answer),
    )
    assert not any(answer.keys() & line.keys() for line in lines_of(tmp_path / "run"))


def test_a_run_that_fails_has_told_what_it_released(tmp_path):
    def broken(server_round, model):
        if server_round == 2:
            raise RuntimeError("the server's disk is full")

    with pytest.raises(RuntimeError, match="disk is full"):
        run(tmp_path / "run", broken, not_covered=("what the app has left out",))
    answer = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert (answer["num_rounds"], answer["epsilon"]) == (2, pytest.approx(2.0))
    assert answer["not_covered"][-1] == "what the app has left out"
    assert "Not covered: what the app has left out" in (tmp_path / "run" / "statement.txt").read_text()
    assert not (tmp_path / "run" / "model.safetensors").exists()
