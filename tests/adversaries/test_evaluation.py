"""Attacks on private evaluation: what a client was really asked against what its ledger was charged."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import optimize

from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.strategies import DPFedAvg, PrivateEvaluation
from tests.closed_forms import gaussian_delta
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

CLIENTS, DELTA = 4, 1e-3
TRAINING_NOISE, EVALUATION_NOISE = 20.0, 1.0
SAMPLERS = {
    "full": FullSampling(),
    "one in turn": RoundRobinSampling(cohort_size=1),
    "three in turn": RoundRobinSampling(cohort_size=3),
}


def evaluating_app():
    app = stock_app(shifted(lambda node: 0.0))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 7, "accuracy": 0.5})}), reply_to=message)

    return app


def model():
    return arrays(weight=np.zeros(3, np.float32))


def strategy_of(*, every, evaluating, training="full", cls=DPFedAvg, **arguments):
    evaluation = PrivateEvaluation(noise_multiplier=EVALUATION_NOISE, sampling=SAMPLERS[evaluating], every=every)
    given = {"clip_norm": 1.0, "noise_multiplier": TRAINING_NOISE, "num_clients": CLIENTS, "delta": DELTA}
    return cls(**given | arguments, sampling=SAMPLERS[training], evaluation=evaluation)


def times_asked(messages):
    """How often each node was asked, by type of message."""
    return {
        kind: Counter(one.metadata.dst_node_id for one in messages if one.metadata.message_type == kind)
        for kind in ("train", "evaluate")
    }


def true_epsilon(messages):
    """The largest cost of a client, in closed form: n releases of multiplier z are one of z / sqrt(n)."""
    asked = times_asked(messages)
    precision = max(
        (asked["train"][node] / TRAINING_NOISE**2 + asked["evaluate"][node] / EVALUATION_NOISE**2 for node in range(1, 99)),
    )
    if not precision:
        return 0.0
    return float(optimize.brentq(lambda e: gaussian_delta(1 / math.sqrt(precision), e) - DELTA, -1, 1000, xtol=1e-9))


# Evaluations that were charged as nothing


@pytest.mark.parametrize(("target", "num_rounds"), [(None, 32), (4.0, 200)])
def test_evaluations_in_turn_are_charged_by_their_own_count(target, num_rounds):
    """By the round's number every evaluation fell on a round that was charged as nothing, and one client had them all."""
    strategy, grid = strategy_of(every=4, evaluating="one in turn", target_epsilon=target), LocalGrid(evaluating_app(), CLIENTS)
    strategy.start(grid, model(), num_rounds=num_rounds)
    assert true_epsilon(grid.sent) <= strategy.statement.epsilon * (1 + 1e-6)
    if target is not None:
        assert 0 < len(strategy.rounds) < num_rounds
        assert strategy.statement.epsilon <= target
        return
    assert times_asked(grid.sent)["evaluate"] == Counter(dict.fromkeys(range(1, CLIENTS + 1), 2))
    assert max(strategy.statement.epsilon_by_release.values()) <= strategy.statement.epsilon
    assert strategy.statement.epsilon == pytest.approx(true_epsilon(grid.sent), rel=1e-3)  # nor is more charged than was asked


CALLS = st.lists(st.tuples(st.sampled_from(["train", "evaluate"]), st.integers(1, 6)), min_size=8, max_size=30)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=CALLS,
    every=st.sampled_from([1, 2, 3]),
    training=st.sampled_from(sorted(SAMPLERS)),
    evaluating=st.sampled_from(sorted(SAMPLERS)),
    target=st.sampled_from([None, 2.0, 5.0]),
)
def test_no_order_of_calls_asks_more_than_is_charged(calls, every, training, evaluating, target):
    """A `start` of one's own may ask for rounds and evaluations in any order, again, or not at all."""
    strategy = strategy_of(every=every, training=training, evaluating=evaluating, target_epsilon=target)
    grid, sent = LocalGrid(evaluating_app(), CLIENTS), []
    strategy.plan(4)
    for kind, server_round in calls:
        configure = strategy.configure_train if kind == "train" else strategy.configure_evaluate
        try:
            sent.extend(configure(server_round, model(), ConfigRecord(), grid))
        except ValueError as error:
            assert "no round was run" in str(error)  # noqa: PT017
    statement = strategy.statement
    assert true_epsilon(sent) <= statement.epsilon * (1 + 1e-6)
    assert max(statement.epsilon_by_release.values()) <= statement.epsilon * (1 + 1e-6)
    assert statement.epsilon <= strategy.epsilon * (1 + 1e-6)
    if target is not None:
        assert statement.epsilon <= target


def test_evaluations_that_a_round_may_still_ask_for_are_paid_before_it():
    """They were left out, for a later time, when the target was compared with a round that came out of order."""
    strategy = strategy_of(every=1, evaluating="full", target_epsilon=4.2)
    grid, sent = LocalGrid(evaluating_app(), CLIENTS), []
    strategy.plan(1)
    for server_round in (1, 3, 5):
        if messages := strategy.configure_train(server_round, model(), ConfigRecord(), grid):
            sent.extend(messages)
            strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    for server_round in (1, 3, 5):
        sent.extend(strategy.configure_evaluate(server_round, model(), ConfigRecord(), grid))
    assert times_asked(sent)["evaluate"][1] >= 1
    assert true_epsilon(sent) <= 4.2
    assert strategy.statement.epsilon <= 4.2


# Newcomers


class Growing(LocalGrid):
    """Two more nodes join after every round of training."""

    def send_and_receive(self, messages, *, timeout=None):
        out = list(messages)
        replies = super().send_and_receive(out, timeout=timeout)
        if any(message.metadata.message_type == "train" and "config" in message.content.config_records for message in out):
            for node in range(len(self.contexts) + 1, len(self.contexts) + 3):
                self.contexts[node] = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        return replies


class Backwards(PoissonSampling):
    """A sampler of a user's own, whose cohorts and charges follow from the number of the round: it may count on the order."""

    def sample(self, server_round, num_clients, rng):
        return np.asarray([-server_round % num_clients])

    def event(self, release, server_round, num_clients):
        return RoundRobinSampling(cohort_size=1).event(release, server_round, num_clients)


@pytest.mark.parametrize(
    ("training", "evaluating", "open_to_newcomers"),
    [
        ("full", "full", True),
        ("full", "one in turn", False),
        ("one in turn", "full", False),
        ("three in turn", "three in turn", False),
        ("own", "own", False),
    ],
)
def test_newcomers_take_part_only_where_no_release_counts_on_whose_turn_it_is(
    training, evaluating, open_to_newcomers, monkeypatch
):
    monkeypatch.setitem(SAMPLERS, "own", Backwards(sampling_rate=0.25))
    strategy, grid = strategy_of(every=1, training=training, evaluating=evaluating), Growing(evaluating_app(), CLIENTS)
    strategy.start(grid, model(), num_rounds=8)
    asked = times_asked(grid.sent)
    assert (max(asked["train"] | asked["evaluate"]) > CLIENTS) == open_to_newcomers
    assert true_epsilon(grid.sent) <= strategy.statement.epsilon * (1 + 1e-6)


# Half an evaluation of one's own


class AsksOnly(DPFedAvg):
    def configure_evaluate(self, server_round, arrays, config, grid):
        return []


class ReadsOnly(DPFedAvg):
    def aggregate_evaluate(self, server_round, replies):
        return None


@pytest.mark.parametrize(("cls", "missing"), [(AsksOnly, "aggregate_evaluate"), (ReadsOnly, "configure_evaluate")])
def test_a_strategy_with_half_an_evaluation_of_its_own_asks_nobody(cls, missing):
    grid = LocalGrid(evaluating_app(), CLIENTS)
    for begin in (
        lambda one: one.start(grid, model(), num_rounds=1),
        lambda one: one.configure_train(1, model(), ConfigRecord(), grid),
    ):
        strategy = strategy_of(every=1, evaluating="full", cls=cls)
        with pytest.raises(ValueError, match=f"overrides .*, but not {missing}"):
            begin(strategy)
        assert not grid.sent
        assert strategy.statement.epsilon == 0


def test_the_evaluation_that_the_page_shows_runs_and_is_not_covered():
    page = (Path(__file__).parents[2] / "docs" / "in-an-existing-app.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def configure_evaluate" in code]
    known = {"DPFedAvg": DPFedAvg, "Message": Message, "MetricRecord": MetricRecord, "RecordDict": RecordDict}
    exec(example, known)  # noqa: S102
    arguments = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": CLIENTS, "delta": DELTA}
    strategy = known["Evaluating"](**arguments)
    result = strategy.start(LocalGrid(evaluating_app(), CLIENTS), model(), num_rounds=2)
    assert dict(result.evaluate_metrics_clientapp[2]) == {"accuracy": 0.5}
    assert any("configure_evaluate" in line for line in strategy.statement.not_covered)


def test_an_evaluation_that_is_put_on_one_object_counts_as_its_own():
    strategy = strategy_of(every=1, evaluating="full")
    strategy.configure_evaluate = lambda *_: []
    strategy.aggregate_evaluate = lambda *_: None
    strategy.start(LocalGrid(evaluating_app(), CLIENTS), model(), num_rounds=1)
    assert any("configure_evaluate" in line for line in strategy.statement.not_covered)
