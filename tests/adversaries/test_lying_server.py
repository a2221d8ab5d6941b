"""A server that lies: models, second vectors and round numbers that are chosen to undo a proof of sensitivity.

Neighboring record sets, the replaced record in the same place of the same random choice. What is measured is u, the sum of the
clipped gradients on the lattice, directly before its noise, against the distance that the noise is made for.
"""

import json
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from flower_dp.clients import DPFedPAQRecipe, FlatModel, LocalDPClient, ScaffoldRecipe, TensorRecords
from flower_dp.clients.client_vectors import KEY as KEPT
from flower_dp.clients.reply.pipeline import ClientJob
from flower_dp.clients.training.clipped_steps import ConvexModel
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, update_terms
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.wire import KEY
from tests.asks import own_instruction
from tests.local_grids import context_of

BASE: dict[str, Any] = {"learning_rate": 0.5, "num_local_steps": 4, "batch_size": 2, "clip_norm": 0.3, "decay_iterations": 100.0}
MSE, BINARY, SOFTMAX = nn.functional.mse_loss, nn.functional.binary_cross_entropy_with_logits, nn.functional.cross_entropy
OWN: dict[str, dict[str, Any]] = {
    "per-step": {},
    "clip-update": {"update_clip_norm": 0.1},
    "convex-glm": {"smoothness": 4.0},
}


def steps_of(sensitivity: str, **arguments: Any) -> FedPAQSteps:
    return FedPAQSteps(**BASE | {"sensitivity": sensitivity} | OWN[sensitivity] | arguments)


@lru_cache
def release_of(steps: FedPAQSteps, size: int) -> Release:
    release = update_terms(steps=steps, epsilon=math.inf, delta=0.1, num_replies=1, num_records=size).release
    return replace(release, mechanism=Gaussian(noise_multiplier=1.0))


def sum_of(
    module: nn.Module,
    steps: FedPAQSteps,
    data: TensorRecords,
    loss: Any,
    *,
    weights: Tensor,
    drift: Tensor | None = None,
    server_round: int = 1,
    seed: int = 0,
) -> Tensor | Exception:
    """The sum u [d] of a real reply before its noise, or why there is none."""
    model = FlatModel(module)
    recipe = ScaffoldRecipe(steps=steps, epsilon=math.inf, delta=0.1, num_replies=1, loss=loss, common=drift)
    pipeline = recipe.pipeline(release_of(steps, len(data)), model=model, server_round=server_round)
    rng = np.random.default_rng(seed)
    (trained,) = pipeline.train.rows(weights, [ClientJob(name="", records=data, seed=0, secret=lambda: rng)])
    return trained if isinstance(trained, Exception) else pipeline.clip(trained[0]).to(torch.float64)


def moved(one: Tensor | Exception, other: Tensor | Exception) -> float | None:
    """How far apart two sums are; None where neither client replies. Both reply, or neither: the reason is public."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        assert str(one) == str(other)
        assert "rounding ends the proof of sensitivity='convex-glm'" in str(one)
        return None
    return float(torch.linalg.vector_norm(one - other))


# A search: whatever the server sends, no neighbors are further apart than the noise is made for


def adversarial(rng: torch.Generator, size: int) -> Tensor:
    """A vector of one of many magnitudes, 2^-149 to 2^120, all of one or each its own, with zeros, or next to a power of two."""
    kind = int(torch.randint(5, (1,), generator=rng))
    ordinary = 2.0 ** float(60 * torch.rand(1, generator=rng) - 20)
    signs = torch.randn(size, generator=rng, dtype=torch.float64)
    if kind == 0:
        values = ordinary * signs
    elif kind == 1:
        values = 2.0 ** float(269 * torch.rand(1, generator=rng) - 149) * signs
    elif kind == 2:
        values = 2.0 ** (269 * torch.rand(size, generator=rng, dtype=torch.float64) - 149) * signs
    elif kind == 3:
        values = ordinary * (1 + 2.0**-23 * torch.randint(-3, 4, (size,), generator=rng)) * signs.sign()
    else:
        values = torch.where(signs > 0, 2.0**54, 2.0**-149) * signs.sign()
    return values.to(torch.float32)


def neighbors(rng: torch.Generator, size: int, features: int, weights: Tensor, loss: Any) -> tuple[TensorRecords, TensorRecords]:
    """Record sets that differ in one record. Targets of squared errors lie at the scores of the server's model."""
    inputs = torch.randn(size, features, generator=rng, dtype=torch.float64)
    inputs = inputs * 10 ** (6 * torch.rand(size, 1, generator=rng, dtype=torch.float64) - 3)
    others = inputs.clone()
    place = int(torch.randint(size, (1,), generator=rng))
    others[place] = (-inputs[place]) if torch.rand(1, generator=rng) < 0.5 else torch.randn(features, generator=rng)
    if loss is MSE:
        shorter = inputs / torch.linalg.vector_norm(inputs, dim=1, keepdim=True).clamp(min=1)
        targets = (shorter @ weights[:features].to(torch.float64)) * (1 + 2.0**-52 * torch.randn(size, generator=rng))
        changed = targets.clone()
        changed[place] = targets[place] * 2 - 1e3
    else:
        targets = torch.randint(2, (size,), generator=rng).to(torch.float64 if loss is BINARY else torch.int64)
        changed = targets.clone()
        changed[place] = 1 - targets[place]
    one, other = TensorRecords(inputs=inputs, targets=targets), TensorRecords(inputs=others, targets=changed)
    if loss is SOFTMAX and features == 4:  # of a network in float32
        return tuple(replace(records, inputs=records.inputs.to(torch.float32)) for records in (one, other))  # type: ignore[return-value]
    return one, other


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sensitivity", "loss"),
    [
        ("dp-fedpaq", "per-step", SOFTMAX),
        ("scaffold", "per-step", SOFTMAX),
        ("scaffold", "clip-update", SOFTMAX),
        ("scaffold", "convex-glm", MSE),
        ("dp-fedpaq", "convex-glm", BINARY),
        ("dp-fedpaq", "convex-glm", SOFTMAX),
        ("scaffold", "convex-glm", SOFTMAX),
    ],
)
def test_no_model_of_the_servers_moves_neighbors_further_apart(sensitivity, loss, method):
    steps = steps_of(sensitivity)
    rng = torch.Generator().manual_seed(7)
    largest, refused = 0.0, 0
    trials = 40 if sensitivity == "convex-glm" else 12
    for trial in range(trials):
        module = nn.Linear(3, 2 if loss is SOFTMAX else 1, bias=False) if sensitivity == "convex-glm" else network()
        features = 3 if sensitivity == "convex-glm" else 4
        size = FlatModel(module).layout.size
        weights = adversarial(rng, size)
        drift = adversarial(rng, size) if method == "scaffold" else None
        number = int(10 ** float(18 * torch.rand(1, generator=rng))) if trial % 3 == 0 else 1
        pair = neighbors(rng, steps.num_records, features, weights, loss)
        made = (sum_of(module, steps, data, loss, weights=weights, drift=drift, server_round=number, seed=trial) for data in pair)
        apart = moved(*made)
        refused += apart is None
        largest = max(largest, apart or 0.0)
    assert largest <= 2 * steps.sum_norm
    assert largest > 0.2 * steps.sum_norm
    assert (0 < refused < trials) if sensitivity == "convex-glm" else refused == 0


def test_the_bound_of_weights_by_hand():
    """C (2^33 - (5 n + 32) E) - 16 E b sqrt(L) over E b m L + 2 (b / eta) (E + 4), for E 4, b 2, eta 1/2, L 4, n 3 or 10."""
    steps = steps_of("convex-glm", clip_norm=1.0)
    assert steps.longest_weights(0.5, columns=3) == pytest.approx((2**33 - 47 * 4 - 16 * 8 * 2) / (8 * 8 * 4 + 2 * 4 * 8))
    assert steps.longest_weights(0.5, columns=10) == pytest.approx((2**33 - 82 * 4 - 16 * 8 * 2) / (8 * 12 * 4 + 2 * 4 * 8))
    for nonsense in (0.0, math.inf, math.nan, 2.0**-300):
        assert steps.longest_weights(nonsense, columns=3) == 0
    # Honest models are never refused: weights of thousands, of MNIST's size, with the paper's steps; and long models.
    paper = steps_of("convex-glm", learning_rate=0.1, num_local_steps=10, batch_size=12, clip_norm=1.0, smoothness=20.0)
    for server_round, columns in ((1, 785), (10_000, 785), (1, 100_000)):
        assert paper.longest_weights(paper.step_size(server_round), columns=columns) > 1_000


# The client: it says why, and pays nothing

DATA = {"a": TensorRecords(inputs=torch.ones(8, 3), targets=torch.zeros(8, 1))}
WORDS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "num_replies": 3, "loss": BINARY}


def asked(client: LocalDPClient, weights: np.ndarray, *, server_round: int = 1, control: np.ndarray | None = None) -> str:
    """Why a client refuses a server whose terms are right; empty if it replies."""
    vectors = {} if control is None else {"control": control}
    terms = {"a": client.recipe.terms("a", DATA["a"])}
    instruction = own_instruction(client.recipe.method, terms, server_round=server_round, vectors=vectors)
    assert client.context is not None
    client.attach(client.context)  # as the next message's app does
    _, _, answer = client.fit([weights, *vectors.values()], {KEY: instruction.to_json()})
    return " ".join(one["reason"] for one in json.loads(answer[KEY])["refused"])


def accounts(client: LocalDPClient) -> list[Any]:
    """The replies that the client has paid for."""
    assert client.context is not None
    return [count for record in client.context.state.config_records.values() for count in record["replies"]]  # type: ignore[union-attr]


def client_of(recipe: Any) -> LocalDPClient:
    return LocalDPClient(model=nn.Linear(3, 1, bias=False), clients=DATA, recipe=recipe, context=context_of(), device="cpu")


def short(length: float) -> np.ndarray:
    return np.array([[0.0, length, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("length", "number"), [(2.0**54, 1), (3e38, 1), (1.0, 10**17), (1.0, 2**63 - 1)], ids=["long", "longest", "late", "never"]
)
def test_a_client_tells_why_and_pays_nothing(length, number):
    client = client_of(DPFedPAQRecipe(steps=steps_of("convex-glm"), **WORDS))
    reported = asked(client, short(length), server_round=number)
    assert "rounding ends the proof" in reported
    assert not accounts(client)
    assert not asked(client, short(1.0))
    assert accounts(client)


def test_a_scaffold_client_counts_the_servers_vector_and_its_own():
    client = client_of(ScaffoldRecipe(steps=steps_of("convex-glm"), **WORDS))
    reported = asked(client, short(1.0), control=np.full(3, 1e30, np.float32))
    assert "rounding ends the proof" in reported
    assert not accounts(client)
    assert not asked(client, short(1.0), control=np.zeros(3, np.float32))
    assert client.context is not None
    client.context.state[KEPT] = ArrayRecord({"a": Array(np.full(3, -1e30, np.float32))})
    assert "rounding ends the proof" in asked(client, short(1.0), control=np.zeros(3, np.float32))
    # Both are long, what is added to a step is not.
    client.context.state[KEPT] = ArrayRecord({"a": Array(np.full(3, 1e30, np.float32))})
    assert not asked(client, short(1.0), control=np.full(3, 1e30, np.float32))


# What a record counts depends on the record alone


def test_a_record_counts_whatever_the_weights():
    """A squared error of 1e76 is no float32, but its clipped gradient is: zero at some weights only would be no convex loss's."""
    steps = steps_of("convex-glm")
    model = ConvexModel.of(FlatModel(nn.Linear(2, 1, bias=False)), MSE, steps)

    def gradient(inputs: list[float], target: float) -> list[float]:
        data = TensorRecords(inputs=torch.tensor([inputs]), targets=torch.tensor([target]))
        return model.clipped_sum(torch.zeros(2, dtype=torch.float64), data, torch.arange(1), seed=0)[0].tolist()

    assert gradient([1.0, 0.0], 1e38) == pytest.approx([-0.3, 0.0])
    assert gradient([1.0, 0.0], 3e38) == pytest.approx([-0.3, 0.0])  # twice that is no float32
    assert gradient([0.0, 0.0], 3e38) == [0.0, 0.0]
    assert gradient([1e-40, 0.0], 3e38) == pytest.approx([-0.06, 0.0], rel=1e-3)  # shorter than the clip norm
    for bad in ([math.nan, 1.0], [math.inf, 1.0]):
        assert gradient(bad, 1.0) == [0.0, 0.0]
    for target in (math.nan, math.inf):
        assert gradient([1.0, 0.0], target) == [0.0, 0.0]


def test_a_score_is_added_up_in_blocks(monkeypatch):
    """The bound counts 2 ceil(sqrt(n)) + 4 additions in a row, whatever order a matrix product has."""
    widths = []
    plain = torch.Tensor.__matmul__

    def counted(one: Tensor, other: Tensor) -> Tensor:
        widths.append(one.shape[-1])
        return plain(one, other)

    model = ConvexModel.of(FlatModel(nn.Linear(1000, 1)), BINARY, steps_of("convex-glm"))
    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    data = TensorRecords(inputs=torch.ones(2, 1000), targets=torch.zeros(2))
    model.clipped_sum(torch.zeros(1001, dtype=torch.float64), data, torch.arange(2), seed=0)
    *scores, of_records = widths
    assert max(scores) <= 32
    assert sum(scores) == 1001
    assert of_records == 2  # their gradients are added up


# What the proof counts on, by hand


def test_the_margin_for_rounding_by_hand():
    """In clip norms: 2^-18 for lattice and steps; 2^-22 for each of E b = 8 records, of which float32 needs a quarter."""
    steps = steps_of("convex-glm", clip_norm=1.0)
    assert steps.sum_norm == 1 + 2.0**-18 + 8 * 2.0**-22
    assert steps_of("per-step", clip_norm=1.0).sum_norm == 3 * 2 + 1
    assert steps_of("clip-update").sum_norm == pytest.approx(0.1 * 2 / 0.5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", [MSE, BINARY, SOFTMAX], ids=["mse", "bce", "ce"])
def test_no_record_is_less_smooth_than_the_steps_say(loss, bias):
    """The largest second derivative in the weights, by differences of the gradients of a record with endless features."""
    steps = steps_of("convex-glm", smoothness=9.0, learning_rate=2 / 9, clip_norm=1e9)
    layer = nn.Linear(2, 2 if loss is SOFTMAX else 1, bias=bias)
    model = ConvexModel.of(FlatModel(layer), loss, steps)
    data = TensorRecords(inputs=torch.tensor([[1e6, 0.0]]), targets=torch.zeros(1, dtype=torch.int64))
    size = model.model.layout.size
    steepest = model.clipped_sum(torch.zeros(size, dtype=torch.float64), data, torch.arange(1), seed=0)[0]
    across = 1e-4 * steepest / torch.linalg.vector_norm(steepest) if steepest.any() else torch.full((size,), 1e-4).double()
    if loss is MSE:  # flat at zero
        data = TensorRecords(inputs=data.inputs, targets=torch.ones(1))
        steepest = model.clipped_sum(torch.zeros(size, dtype=torch.float64), data, torch.arange(1), seed=0)[0]
        across = 1e-4 * steepest / torch.linalg.vector_norm(steepest)
    ends = [model.clipped_sum(sign * across, data, torch.arange(1), seed=0)[0] for sign in (1, -1)]
    curvature = float(torch.linalg.vector_norm(ends[0] - ends[1]) / 2e-4)
    assert curvature == pytest.approx(9.0, rel=1e-3)
