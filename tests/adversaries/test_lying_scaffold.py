"""A client that lies about its update, to move SCAFFOLD's control variate, which honest clients then carry on."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from flower_dp.clients import DPFedPAQRecipe, ScaffoldRecipe
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import DPFedPAQ, Scaffold
from flower_dp.strategies.control import ControlState, ControlVariate, Honest
from flower_dp.strategies.releases.replies import Collected
from tests.local_grids import NAMES, grid_of, records, start

STEPS = FedPAQSteps(
    learning_rate=0.2, num_local_steps=2, batch_size=4, clip_norm=0.5, sensitivity="per-step", decay_iterations=None
)
TEN = {name: records(name) for name in NAMES[:10]}
SIZE = 18


def run(strategy_of: Any, recipe_of: Any, rounds: int, *, lies: bool, levels: int | None = None) -> tuple[torch.Tensor, Any]:
    """The final model and the strategy; one of ten sends the longest row that is accepted, always in one direction."""
    arguments: dict[str, Any] = {
        "steps": STEPS,
        "epsilon": 20.0,
        "delta": 1e-5,
        "num_replies": rounds,
        "quantization_levels": levels,
    }
    strategy = strategy_of(**arguments, sampling=FullSampling(), num_clients=10, num_records=8, noise_seed=3)

    def tamper(node: int, reply: Message) -> list[Message]:
        if node == 10 and lies:
            record = next(iter(reply.content.array_records.values()))
            (name,) = record
            row = np.zeros(SIZE, np.float32)
            (asked,) = strategy._session.asked.values()
            row[0] = -1.99 * asked.limits.honest_norm(["c9"])
            record[name] = Array(row)
        return [reply]

    grid = grid_of(recipe_of(**arguments), TEN, tamper=tamper, seeds=lambda context: int(context.node_id))
    model = start(strategy, grid, rounds)
    assert [report.replies for report in strategy.rounds] == [10] * rounds
    return model, strategy


@pytest.mark.slow
def test_a_liar_moves_the_model_little_further_than_without_control_variates():
    """Unbounded, c grows by a tenth every round: after 8 the model has norm 57, and that of DP-FedPAQ, where the same liar sends what it can, 5."""
    model, strategy = run(Scaffold, ScaffoldRecipe, 8, lies=True)
    control = strategy.rules.control.vector(SIZE)
    assert np.linalg.norm(control) <= strategy.rules._honest(SIZE).mean * (1 + 1e-6)
    plain, _ = run(DPFedPAQ, DPFedPAQRecipe, 8, lies=True)
    assert torch.linalg.vector_norm(model) < 5 * torch.linalg.vector_norm(plain)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [None, 40])
def test_honest_runs_are_the_same_bit_for_bit(monkeypatch, levels):
    bounded, one = run(Scaffold, ScaffoldRecipe, 3, lies=False, levels=levels)
    monkeypatch.setattr(ControlVariate, "_radius", lambda *_: math.inf)
    free, other = run(Scaffold, ScaffoldRecipe, 3, lies=False, levels=levels)
    assert torch.equal(bounded, free)
    assert np.array_equal(one.rules.control.vector(SIZE), other.rules.control.vector(SIZE))


def test_the_statement_says_how_far_a_liar_moves_the_model():
    """By hand: E eta = 2 x 0.2; a message is at most 2 G + |c|, the server takes twice that, and the mean is over ten."""
    words: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-5, "num_replies": 1}
    fresh = Scaffold(steps=STEPS, **words, sampling=FullSampling(), num_clients=10, num_records=8)
    assert any(line.startswith("A LYING CLIENT") for line in fresh.statement.assumptions)
    _, strategy = run(Scaffold, ScaffoldRecipe, 2, lies=True)
    (line,) = [line for line in strategy.statement.assumptions if line.startswith("A LYING CLIENT")]
    made = strategy.rules._honest(SIZE)
    sent, plain, norm, carried = map(float, re.findall(r"(?:up to|DP-FedPAQ:) (\d+\.?\d*)", line))
    assert sent == pytest.approx(2 * 0.4 * (2 * made.single + made.mean) / 10, rel=1e-2)
    assert plain == pytest.approx(2 * 0.4 * made.single / 10, rel=1e-2)
    assert norm == pytest.approx(made.mean, rel=1e-2)
    assert carried == pytest.approx(0.4 * made.mean, rel=1e-2)
    _, other = run(DPFedPAQ, DPFedPAQRecipe, 1, lies=False)
    assert not any("LYING" in line for line in other.statement.assumptions)


def test_a_liar_moves_the_model_no_further_than_the_statement_says():
    """Each round by its own row and by c, and the honest clients by their own gradients and noise, each within its bound."""
    model, strategy = run(Scaffold, ScaffoldRecipe, 4, lies=True)
    made = strategy.rules._honest(SIZE)
    sent, radius = strategy.rules.control.longest_ever(SIZE, made)
    assert torch.linalg.vector_norm(model) <= 4 * 0.4 * (2 * sent / 10 + radius + 2 * made.single)
    assert np.linalg.norm(strategy.rules.control.vector(SIZE)) <= radius * (1 + 1e-6)


def test_what_honest_clients_make_by_hand():
    """(E b C + std (sqrt(d) + 10)) / (E b), with the std of one client, and that of the mean of ten."""
    arguments: dict[str, Any] = {"steps": STEPS, "epsilon": 20.0, "delta": 1e-5, "num_replies": 1}
    strategy = Scaffold(**arguments, sampling=FullSampling(), num_clients=10, num_records=8)
    start(strategy, grid_of(ScaffoldRecipe(**arguments), TEN), 1)
    std = strategy.rules.books.terms["c0"].release.noise_scale
    made = strategy.rules._honest(SIZE)
    assert made.single == pytest.approx(0.5 + std * (math.sqrt(18) + 10) / 8)
    assert made.mean == pytest.approx(0.5 + std / math.sqrt(10) * (math.sqrt(18) + 10) / 8)


@pytest.mark.parametrize(("levels", "radius"), [(None, 2.0), (10, (2.0 + 2 * 0.4 * 3.0) / 0.6)])
def test_the_control_variate_is_shortened_to_what_honest_clients_make(levels, radius):
    """d = 16: messages of 10 levels have errors of at most 4 / 10 of their norm."""
    honest = Honest(single=3.0, mean=2.0)
    control, total = ControlVariate(levels), np.zeros(16)

    def learnt(state, value):
        total[3] = value
        return control.learn(state, Collected(total=total, clients=["a"]), divisor=0.1, num_clients=1, honest=honest)

    state = learnt(ControlState(), -0.1)
    assert np.linalg.norm(control.vector(state, 16)) == pytest.approx(1.0)  # as it was learned
    state = learnt(state, -1e6)
    assert control.vector(state, 16)[3] == pytest.approx(radius)
    most = 2 * 3.0 + 2.0 if levels is None else (2 * 3.0 + radius) / 0.6
    assert control.longest(3.0, control.vector(state, 16), honest=honest) == pytest.approx(most)
