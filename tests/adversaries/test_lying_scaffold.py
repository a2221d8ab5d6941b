"""A client that lies about its update, to move SCAFFOLD's control variate, which honest clients then carry on."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from flower_dp import wire
from flower_dp.clients import DPFedPAQRecipe, ScaffoldRecipe
from flower_dp.core import compression
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import DPFedPAQ, Scaffold
from tests.grids import asks_to_train
from tests.local_grids import NAMES, grid_of, records, start

STEPS = FedPAQSteps(
    learning_rate=0.2, num_local_steps=2, batch_size=4, clip_norm=0.5, sensitivity="per-step", decay_iterations=None
)
WORDS: dict[str, Any] = {"steps": STEPS, "epsilon": 20.0, "delta": 1e-5}
TEN = {name: records(name) for name in NAMES[:10]}
SIZE, MOVES = 18, 2 * 0.2  # E eta


def bounds(num_replies: int) -> tuple[float, float]:
    """What one honest client makes, and ten: (E b C + std (sqrt(d) + 10)) / (E b), with the std of one, and that of their mean."""
    std = ScaffoldRecipe(**WORDS, num_replies=num_replies).terms("c0", TEN["c0"]).release.noise_scale
    single, mean = (0.5 + one * (math.sqrt(SIZE) + 10) / 8 for one in (std, std / math.sqrt(10)))
    return single, mean


def control_of(message: Message) -> np.ndarray:
    """The control variate that the server sends; zero in messages of a method without one."""
    arrays = [array.numpy() for array in message.content["arrays"].values()]
    vector = wire.instruction_of(message.content["config"], arrays).ask.vectors.get("control", np.zeros(SIZE))
    return np.asarray(vector, np.float64)


def run(strategy_of: Any, recipe_of: Any, rounds: int, *, lies: bool, levels: int | None = None) -> tuple[Any, Any, list[float]]:
    """The final model, the strategy, and the norms of c; one of ten sends nearly the longest row that is accepted, always one way."""
    arguments = {**WORDS, "num_replies": rounds, "quantization_levels": levels}
    strategy = strategy_of(**arguments, sampling=FullSampling(), num_clients=10, num_records=8, noise_seed=3)
    single, _ = bounds(rounds)

    def tamper(node: int, reply: Message) -> list[Message]:
        if node == 10 and lies:
            longest = 2 * single + np.linalg.norm(control_of(grid.sent[-1])) if strategy_of is Scaffold else single
            row = np.eye(1, SIZE)[0] * -1.99 * MOVES * longest
            made = compression.dense(row) if levels is None else compression.qsgd(row, levels, np.random.default_rng(node))
            (record,), (answer,) = reply.content.array_records.values(), reply.content.config_records.values()
            record[next(iter(record))] = Array(np.ascontiguousarray(made.arrays[0]))
            answer[wire.KEY] = json.dumps(json.loads(answer[wire.KEY]) | {"payload": dict(made.header)})
        return [reply]

    grid = grid_of(recipe_of(**arguments), TEN, tamper=tamper, seeds=lambda context: int(context.node_id))
    model = start(strategy, grid, rounds)
    assert [report.replies for report in strategy.rounds] == [10] * rounds
    return model, strategy, [float(np.linalg.norm(control_of(one))) for one in grid.sent if asks_to_train(one)]


@pytest.mark.slow
@pytest.mark.parametrize("levels", [None, 40])
def test_a_liar_moves_the_model_little_further_than_without_control_variates_and_no_further_than_is_said(levels):
    """Unbounded, c grows by a tenth every round: after 8 the model has norm 57, and that of DP-FedPAQ, where the same liar sends what it can, 5."""
    model, _, norms = run(Scaffold, ScaffoldRecipe, 8, lies=True, levels=levels)
    single, mean = bounds(8)
    # Messages of 40 levels have errors of at most sqrt(d) / 40 of their norm.
    error = 0.0 if levels is None else math.sqrt(SIZE) / levels
    radius = (mean + 2 * error * single) / (1 - error)
    assert 0.9 * radius < max(norms) <= radius * (1 + 1e-6)
    plain, *_ = run(DPFedPAQ, DPFedPAQRecipe, 8, lies=True, levels=levels)
    assert torch.linalg.vector_norm(model) < 5 * torch.linalg.vector_norm(plain)
    # Each round by its own row and by c, and the honest clients by their own gradients and noise, each within its bound.
    assert torch.linalg.vector_norm(model) <= 8 * MOVES * (2 * (2 * single + radius) / (1 - error) / 10 + radius + 2 * single)


def test_the_statement_says_how_far_a_liar_moves_the_model():
    """A message is at most 2 G + |c|, the server takes twice that, and the mean is over ten."""
    fresh = Scaffold(**WORDS, num_replies=1, sampling=FullSampling(), num_clients=10, num_records=8)
    assert any(line.startswith("A LYING CLIENT") for line in fresh.statement.assumptions)
    _, strategy, _ = run(Scaffold, ScaffoldRecipe, 2, lies=True)
    (line,) = [line for line in strategy.statement.assumptions if line.startswith("A LYING CLIENT")]
    single, mean = bounds(2)
    by_hand = [2 * MOVES * (2 * single + mean) / 10, 2 * MOVES * single / 10, mean, MOVES * mean]
    assert list(map(float, re.findall(r"(?:up to|DP-FedPAQ:) (\d+\.?\d*)", line))) == pytest.approx(by_hand, rel=1e-2)
    _, other, _ = run(DPFedPAQ, DPFedPAQRecipe, 1, lies=False)
    assert not any("LYING" in line for line in other.statement.assumptions)
