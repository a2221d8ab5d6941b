"""The journal of a run and its `evaluate_fn`: who follows it, what they learn, and what their errors do."""

import logging

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling
from flower_dp.strategies import DPFedAvg
from flower_dp.strategies.journal import OBSERVERS
from tests.contract_runs import SEED, SMALL, grid_of, run_of, start
from tests.contracts import Words
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app
from tests.test_contract import some_methods

SECRET = {"cohort-size", "replies", "bytes-down", "bytes-up", "seconds", "elapsed", "missing", "incidents"}
WORDS = {"clip_norm": 1.0, "noise_multiplier": 2.0, "num_clients": 4, "delta": 1e-3}


def grid():
    return LocalGrid(stock_app(shifted(lambda node: 0.1)), 4)


def weights():
    return arrays(w=np.zeros(3, np.float32))


def made(kind=DPFedAvg, **words):
    return kind(**WORDS | {"sampling": FullSampling()} | words)


class Keep:
    """Keeps what it is called with; may fail."""

    def __init__(self, fails=()):
        self.calls, self.lines, self.fails = [], [], fails

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise OSError(f"{name}: no connection")

    def open(self):
        self._call("open")

    def __call__(self, line):
        self.lines.append(dict(line))
        line.clear()
        line["epsilon"] = 0.001
        self._call("line")

    def close(self):
        self._call("close")


class Observer:
    """What a run folder sees."""

    def __init__(self):
        self.lines, self.ends = [], []

    def line(self, line):
        self.lines.append(line)

    def end(self, statement, result):
        self.ends.append((statement, result))


@pytest.fixture
def seen():
    observer = Observer()
    token = OBSERVERS.set(lambda: (observer,))
    yield observer
    OBSERVERS.reset(token)


@pytest.mark.slow
@some_methods(lambda method: method.label in {"dp-fedavg, stock clients", "dp-pasgd", "nbafl"})
def test_a_tracker_learns_of_every_round_and_its_errors_change_nothing(method, caplog):
    words = Words(noise_seed=SEED, num_rounds=2)
    alone = run_of(method, words, noise_seed=SEED)
    strategy, keep = method.strategy(words), Keep(fails=("line", "close"))
    strategy.on_round = keep
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run = start(strategy, grid_of(method, words, noise_seed=SEED), words, SMALL)
    assert [line["round"] for line in keep.lines] == [0, 1, 2]
    assert [line["num-rounds"] for line in keep.lines] == [2] * 3
    assert keep.calls == ["open", *["line"] * 3, "close"]
    assert run.bits == alone.bits
    assert strategy.charges.numbers() == alone.strategy.charges.numbers()
    assert str(strategy.statement) == str(alone.strategy.statement)
    failures = [entry.getMessage() for entry in caplog.records if "on_round failed" in entry.getMessage()]
    assert failures[1] == "on_round failed at round 1, and the run continues: OSError: line: no connection"
    assert len(failures) == 4


def test_a_tracker_that_cannot_begin_ends_the_run_before_any_client_is_asked():
    keep, asked = Keep(fails=("open",)), grid()
    strategy = made(on_round=keep)
    with pytest.raises(OSError, match="open: no connection"):
        strategy.start(asked, weights(), num_rounds=2)
    assert (keep.calls, asked.sent, strategy.epsilon) == (["open"], [], 0.0)
    keep.fails = ()
    strategy.start(asked, weights(), num_rounds=2)
    assert keep.calls[1:] == ["open", "line", "line", "line", "close"]


@pytest.mark.parametrize("sampling", [PoissonSampling(sampling_rate=0.9), FixedSizeSampling(cohort_size=2), FullSampling()])
def test_a_tracker_learns_nothing_of_a_secret_cohort(sampling):
    keep = Keep()
    strategy = made(sampling=sampling, relation="replace-one", on_round=keep)
    strategy.start(grid(), weights(), num_rounds=3, evaluate_fn=lambda number, model: MetricRecord({"rmse": number / 2}))
    public = {"round", "num-rounds", "epsilon", "delta", "rmse"}
    secret = not isinstance(sampling, FullSampling)
    for line in keep.lines[1:]:
        assert line.keys() - SECRET == public | {"bytes-per-client"}
        assert (SECRET & line.keys() == set()) is secret
    assert [line["rmse"] for line in keep.lines] == [0, 0.5, 1, 1.5]
    assert [line["epsilon"] for line in keep.lines] == [0.0, *(report.epsilon for report in strategy.rounds)]


@pytest.mark.parametrize(("failing", "rounds"), [("line", 1), ("end", 2)])
def test_a_folder_that_cannot_be_written_ends_the_run_and_leaves_no_tracker_open(failing, rounds, seen, monkeypatch):
    """It is no failure of the user's function."""

    def full(*given):
        if failing == "end" or given[0]["round"] == 1:
            raise OSError("no space left on device")

    monkeypatch.setattr(seen, failing, full)
    strategy = made(on_round=Keep())
    with pytest.raises(OSError, match="no space left"):
        strategy.start(grid(), weights(), num_rounds=2)
    assert len(strategy.rounds) == rounds
    assert (strategy.on_round.calls[0], strategy.on_round.calls[-1]) == ("open", "close")


def test_what_a_tracker_does_to_a_line_reaches_nobody_else(seen):
    strategy = made(on_round=Keep())
    strategy.start(grid(), weights(), num_rounds=2)
    assert [line["epsilon"] for line in seen.lines] == [0.0, *(report.epsilon for report in strategy.rounds)]


def test_what_is_no_function_is_refused():
    with pytest.raises(ValueError, match=r"on_round='runs': must be a function"):
        made(on_round="runs")


# Loops of one's own


def own_loop(self, grid, initial_arrays, num_rounds=3, timeout=3600, evaluate_fn=None, **_):
    """As in Flower's advanced example."""
    current = initial_arrays
    for number in range(1, num_rounds + 1):
        messages = self.configure_train(number, current, ConfigRecord(), grid)
        current, _ = self.aggregate_train(number, grid.send_and_receive(messages, timeout=timeout))
        if evaluate_fn:
            evaluate_fn(number, current)
    return current


class OwnLoop(DPFedAvg):
    start = own_loop


class InKeywords(OwnLoop):
    def start(self, grid, initial_arrays, **named):
        return super().start(grid, initial_arrays, **named)


class Mixin:
    start = own_loop


class Mixed(Mixin, DPFedAvg):
    """A loop that comes from a class that is no strategy."""


@pytest.mark.parametrize("kind", [OwnLoop, InKeywords, Mixed])
def test_a_loop_of_ones_own_is_followed(kind, seen):
    strategy = made(kind)
    model = strategy.start(grid(), weights(), num_rounds=2, evaluate_fn=lambda number, model: MetricRecord({"rmse": number}))
    assert isinstance(model, ArrayRecord)
    assert [(line["round"], line.get("rmse"), line["num-rounds"]) for line in seen.lines] == [(0, None, 2), (1, 1, 2), (2, 2, 2)]
    ((statement, result),) = seen.ends
    assert str(statement) == str(strategy.statement)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), model["w"].numpy())


class Own(DPFedAvg):
    """Another final model than the last, and a number of its own in the lines."""

    def start(self, grid, initial_arrays, num_rounds=3, **named):
        result = super().start(grid, initial_arrays, num_rounds, **named)
        result.arrays = arrays(w=np.full(3, 7.0, np.float32))
        return result

    def line_of(self, server_round):
        return {**super().line_of(server_round), "site": 7}


def test_lines_and_final_model_are_those_of_the_strategys_own_class(seen):
    result = made(Own).start(grid(), weights(), num_rounds=2)
    assert [(line["round"], line["site"]) for line in seen.lines] == [(0, 7), (1, 7), (2, 7)]
    ((_, found),) = seen.ends
    assert found is result
    assert found.arrays["w"].numpy()[0] == 7.0


# Runs that fail


@pytest.mark.parametrize(
    ("which", "when"), [(0, "on the initial model, before any charge"), (2, "in round 2, whose cost is stated")]
)
def test_a_failing_evaluate_fn_is_named_and_what_was_released_before_is_in_the_journal(which, when, seen):
    def broken(number, model):
        if number == which:
            raise KeyError("rmse")
        return {"rmse": float(number)}

    strategy, nodes = made(), grid()
    with pytest.raises(RuntimeError, match=f"evaluate_fn failed {when}: KeyError: 'rmse'"):
        strategy.start(nodes, weights(), num_rounds=3, evaluate_fn=broken)
    assert [line["round"] for line in seen.lines] == list(range(which + 1))
    assert ["rmse" in line for line in seen.lines] == [True] * which + [False]
    assert seen.lines[-1]["epsilon"] == strategy.epsilon
    ((statement, result),) = seen.ends
    assert (statement.num_charged_rounds, len(strategy.rounds), len(nodes.received), result) == (which, which, 4 * which, None)


@pytest.mark.parametrize("returned", [(0.5, {"accuracy": 0.9}), 0.5, [0.5]])
def test_what_is_no_metrics_is_refused_by_name_before_a_charge(returned):
    strategy, nodes = made(), grid()
    with pytest.raises(RuntimeError, match=r"before any charge: TypeError: it returned a .*: must be a MetricRecord, a dict"):
        strategy.start(nodes, weights(), num_rounds=3, evaluate_fn=lambda server_round, arrays: returned)
    assert (strategy.epsilon, nodes.received) == (0, [])


def test_a_run_that_did_not_begin_has_no_line(seen):
    with pytest.raises(ValueError, match="num_rounds"):
        made().start(grid(), weights(), num_rounds=-1)
    assert seen.lines == []
