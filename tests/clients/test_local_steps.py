"""The sensitivities of DP-FedPAQ, attacked: neighboring record sets whose updates are as far apart as a search can bring them.

A replaced record is in the same place of the same random choice for both: that is the pair that the proof bounds.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flower_dp.clients import DPFedPAQRecipe, FlatModel, TensorRecords
from flower_dp.clients.reply.parts import RecordClip
from flower_dp.clients.reply.pipeline import ClientJob
from flower_dp.clients.training.clipped_steps import ClippedSteps, ConvexModel
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, update_terms
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release

BASE: dict[str, Any] = {"learning_rate": 0.5, "num_local_steps": 2, "batch_size": 1, "clip_norm": 1.0, "decay_iterations": None}
BINARY = nn.functional.binary_cross_entropy_with_logits


def steps_of(sensitivity: str, **arguments: Any) -> FedPAQSteps:
    return FedPAQSteps(**BASE | {"sensitivity": sensitivity} | arguments)


@lru_cache
def release_of(steps: FedPAQSteps, size: int) -> Release:
    """The release of a client, with some noise: its lattice rounds what leaves."""
    release = update_terms(steps=steps, epsilon=math.inf, delta=0.1, num_replies=1, num_records=size).release
    return replace(release, mechanism=Gaussian(noise_multiplier=1.0))


def update_of(model: FlatModel, steps: FedPAQSteps, data: TensorRecords, loss: Any, *, seed: int) -> Tensor:
    """The update of one client without its noise, by the clip and the after-noise part of the real pipeline."""
    recipe = DPFedPAQRecipe(steps=steps, epsilon=math.inf, delta=0.1, num_replies=1, quantization_levels=None, loss=loss)
    pipeline = recipe.pipeline(release_of(steps, len(data)), model=model, server_round=1)
    start, rng = model.vector.clone(), np.random.default_rng(seed)
    (trained,) = pipeline.train.rows(start, [ClientJob(name="", records=data, seed=0, secret=lambda: rng)])
    model.vector.copy_(start)
    if isinstance(trained, Exception):
        raise trained
    return pipeline.after_noise(pipeline.clip(trained[0])).to(torch.float64)


def distance(model, steps, records, loss, seed=0):
    one, other = (update_of(model, steps, own, loss, seed=seed) for own in records)
    return float(torch.linalg.vector_norm(one - other))


def neighbors(rng: torch.Generator) -> tuple[TensorRecords, TensorRecords]:
    """4 records of 3 features of wild sizes, and the same with another one in one place."""

    def scale(*size: int) -> Tensor:
        return 10 ** (4 * torch.rand(size, generator=rng) - 2)

    inputs, targets = torch.randn(4, 3, generator=rng) * scale(4, 1), torch.randint(2, (4,), generator=rng)
    others, labels, place = inputs.clone(), targets.clone(), int(torch.randint(4, (1,), generator=rng))
    others[place], labels[place] = torch.randn(3, generator=rng) * scale(1), 1 - targets[place]
    return TensorRecords(inputs=inputs, targets=targets), TensorRecords(inputs=others, targets=labels)


# Where the bound is tight, a smaller one is found out


class Saddle(nn.Module):
    """A linear network 1-1-1, w2 w1 x, that starts near its saddle: the first record decides which way all others push."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.first.weight, 1e-4)
        nn.init.constant_(self.second.weight, 1e-4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


def downhill(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(-1) * targets).mean()


def saddle_records(size: int, batch: int, seed: int, sign: float) -> TensorRecords:
    """The first of the first mini-batch decides; the others of that one push against each other, and all later ones outwards."""
    targets = torch.full((size,), -1.0)
    order = np.random.default_rng(seed).permutation(size)
    targets[order[1:batch:2]] = 1.0
    targets[order[0]] = sign
    return TensorRecords(inputs=torch.full((size, 1), 1e8), targets=targets)


@pytest.mark.parametrize(
    ("sensitivity", "num_steps", "batch"),
    # One record of several in the first step turns less than the whole update around.
    [*(("per-step", *sizes) for sizes in ((1, 1), (5, 1), (4, 3))), ("clip-update", 1, 1), ("clip-update", 5, 1)],
)
def test_the_saddle_of_a_linear_network_reaches_the_bound(sensitivity, num_steps, batch):
    """One record at the saddle turns every later step around: all of the bound is needed, and 5 % less is not enough."""
    longest = num_steps * BASE["learning_rate"] * BASE["clip_norm"]
    own = {"update_clip_norm": 0.6 * longest} if sensitivity == "clip-update" else {}
    steps = steps_of(sensitivity, num_local_steps=num_steps, batch_size=batch, **own)
    records = tuple(saddle_records(num_steps * batch, batch, 4, sign) for sign in (1.0, -1.0))
    apart = distance(FlatModel(Saddle()), steps, records, downhill, seed=4)
    bound = 2 * (0.6 * longest if sensitivity == "clip-update" else 0.5 * (num_steps - 1 + 1 / batch))
    assert steps.update_sensitivity(1) == pytest.approx(bound)
    assert 0.95 * bound < apart <= bound * (1 + 1e-6)


def logistic(features: int = 3) -> FlatModel:
    layer = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return FlatModel(nn.Sequential(nn.Flatten(), layer))


def convex(**arguments: Any) -> FedPAQSteps:
    return steps_of("convex-glm", **{"smoothness": 4.0, "clip_norm": 0.25} | arguments)


def test_one_step_of_logistic_regression_reaches_2_eta_c_over_b():
    steps = convex(num_local_steps=1, batch_size=2)
    features = torch.eye(3)[:2] * 2
    records = tuple(TensorRecords(inputs=features, targets=torch.tensor([label, 0.0])) for label in (0.0, 1.0))
    apart = distance(logistic(), steps, records, BINARY)
    bound = 2 * 0.5 * 0.25 / 2
    assert steps.update_sensitivity(1) == pytest.approx(bound, rel=1e-4)
    assert steps.update_sensitivity(1) > bound
    assert 0.95 * bound < apart <= steps.update_sensitivity(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "outputs", "bias"),
    [(BINARY, 1, True), (nn.functional.mse_loss, 1, False), (nn.functional.cross_entropy, 2, True)],
    ids=["bce", "mse", "ce"],
)
def test_no_neighbors_of_a_convex_model_are_further_apart(loss, outputs, bias):
    steps = convex(num_local_steps=4, smoothness=20.0 if bias else 4.0, learning_rate=0.1 if bias else 0.5, clip_norm=0.3)
    rng = torch.Generator().manual_seed(4)
    largest = 0.0
    for trial in range(40):
        records = neighbors(rng)
        if loss is not nn.functional.cross_entropy:
            records = tuple(replace(own, targets=own.targets.to(torch.float32)) for own in records)
        layer = nn.Linear(3, outputs, bias=bias)
        layer.weight.data = torch.randn(outputs, 3, generator=rng)
        if bias:
            layer.bias.data = torch.randn(outputs, generator=rng)
        largest = max(largest, distance(FlatModel(layer), steps, records, loss, seed=trial))
    assert 0.8 * steps.update_sensitivity(1) < largest <= steps.update_sensitivity(1)


def test_rounding_to_the_lattice_moves_neighbors_no_further_apart():
    """Sums of 3 C / 16 and C / 16 in each of 256 places, both rounded down, one by hardly anything: a step as coarse as that of
    other sensitivities brings them further apart than the noise is made for."""
    clip_norm = 1 + 0.677 / 256  # of 256.677 such steps in every place, of which 0.031 and 0.677 are rounded away
    steps = convex(num_local_steps=1, batch_size=3, clip_norm=clip_norm)
    inputs = torch.ones(3, 256)
    targets = torch.tensor([[-1e9, -1e9, -1e9], [-1e9, 1e9, -1e9]])
    records = tuple(TensorRecords(inputs=inputs, targets=labels) for labels in targets)
    apart = distance(logistic(256), steps, records, nn.functional.mse_loss)
    assert 2 * 0.5 * clip_norm / 3 * (1 - 1e-6) < apart <= steps.update_sensitivity(1)
    # At most 2^-20 of the clip norm in all places together.
    for noise_scale in (1e-3, 1.0, 1e6):
        assert steps.lattice_step(noise_scale, 256) * 16 <= 2.0**-20 * clip_norm


def steep(scale: float) -> tuple[TensorRecords, ...]:
    """The first record drives two models apart, nearly across the second one's features; and that one is steep between the two."""
    first = int(np.random.default_rng(0).permutation(2)[0])
    features = torch.zeros(2, 3)
    features[first] = torch.tensor([2.0, 0.02, 0.0])
    features[1 - first] = torch.tensor([0.0, scale, 0.0])
    label = torch.arange(2) == first
    return tuple(TensorRecords(inputs=features, targets=value * label) for value in (0.0, 1.0))


@pytest.mark.parametrize("scale", [2.0, 1e8])
def test_features_beyond_the_smoothness_do_not_drive_models_apart(scale):
    """Without scaling features down the second step brings the models 10 % further apart than 2 eta C / b."""
    steps = convex()
    assert distance(logistic(), steps, steep(scale), BINARY) <= steps.update_sensitivity(1)


# Which models have the proof


def with_more() -> nn.Module:
    """Which of the vector's places are the layer's would not be known."""
    model = nn.Sequential(nn.Linear(3, 1))
    model.register_parameter("more", nn.Parameter(torch.zeros(4)))
    return model


class Squared(nn.Linear):
    """A linear layer in disguise."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) ** 2


@pytest.mark.parametrize(
    ("model", "loss", "smoothness", "says"),
    [
        (nn.Linear(3, 3), nn.functional.cross_entropy, 4.0, "2 outputs with cross_entropy, has 3; for more classes"),
        (nn.Linear(3, 2), BINARY, 4.0, "1 outputs"),
        (nn.Linear(3, 1), lambda outputs, targets: BINARY(outputs, targets) + 0, 4.0, "one of torch.nn.functional's"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), BINARY, 4.0, "has Linear, Linear"),
        (nn.Sequential(nn.Dropout(), nn.Linear(3, 1)), BINARY, 4.0, "has Dropout, Linear"),
        (Squared(3, 1), BINARY, 4.0, "has Squared"),
        (type("Own", (nn.Sequential,), {})(nn.Linear(3, 1)), BINARY, 4.0, "has Own"),
        (with_more(), BINARY, 4.0, "one trainable Linear layer, and no other"),
        (nn.Linear(3, 1), BINARY, 0.2, "the bias alone is less smooth"),
    ],
)
def test_a_model_without_the_proof_is_refused(model, loss, smoothness, says):
    data = TensorRecords(inputs=torch.zeros(2, 3), targets=torch.zeros(2))
    with pytest.raises(ValueError, match=says):
        update_of(FlatModel(model), convex(smoothness=smoothness), data, loss, seed=0)


@pytest.mark.parametrize(("loss", "outputs"), [(BINARY, 1), (nn.functional.mse_loss, 1), (nn.functional.cross_entropy, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_convex_gradients_are_those_of_autograd(loss, outputs, bias):
    """Two sources for one gradient, where nothing is clipped or scaled."""
    steps = convex(smoothness=1e6, learning_rate=1e-7, clip_norm=1e6)
    rng = torch.Generator().manual_seed(3)
    layer = nn.Linear(4, outputs, bias=bias)
    layer.weight.data = torch.randn(outputs, 4, generator=rng)
    model, inputs, targets = FlatModel(layer), torch.randn(6, 4, generator=rng), torch.randint(2, (6,), generator=rng)
    targets = targets if outputs == 2 else targets.to(torch.float32)
    data = TensorRecords(inputs=inputs, targets=targets)
    convex_model = ConvexModel.of(model, loss, steps)
    summed, mean_loss = convex_model.clipped_sum(model.vector.to(torch.float64), data, torch.arange(6), seed=0)
    predicted = layer(inputs) if outputs == 2 else layer(inputs).reshape(-1)
    value = loss(predicted, targets)
    expected = torch.cat([gradient.reshape(-1) for gradient in torch.autograd.grad(value, list(layer.parameters()))])
    torch.testing.assert_close(summed.to(torch.float32), 6 * expected, rtol=1e-5, atol=1e-5)
    assert float(mean_loss) == pytest.approx(value.item(), rel=1e-5)


def test_convex_gradients_are_clipped_and_bad_records_count_as_zero():
    class Broken(TensorRecords):
        def batch(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
            if 1 in positions:
                raise OSError("unreadable")
            return super().batch(positions, device)

    inputs, targets = torch.tensor([[3.0, 4.0], [0, 0], [math.nan, 1.0], [3.0, 4.0]]), torch.tensor([0, 0, 0, 7])
    steps = convex(smoothness=1000.0, learning_rate=1e-3, clip_norm=0.1)
    model = FlatModel(nn.Linear(2, 2, bias=False))
    nn.init.zeros_(model.module.weight)
    convex_model, weights = ConvexModel.of(model, nn.functional.cross_entropy, steps), torch.zeros(4, dtype=torch.float64)
    summed, _ = convex_model.clipped_sum(weights, Broken(inputs=inputs, targets=targets), torch.arange(4), seed=0)
    # Of record 0 alone: (p - y) x is (-, +) 0.5 (3, 4), clipped to 0.1.
    expected = torch.tensor([-3.0, -4.0, 3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(summed, expected * 0.1 / torch.linalg.vector_norm(expected))


# The steps themselves


def test_records_are_drawn_without_replacement_anew_for_every_reply():
    class Spy(TensorRecords):
        def batch(self, positions: Tensor, device: torch.device) -> Any:
            seen.extend(positions.tolist())
            raise OSError

    model, steps, spy = (
        logistic(),
        convex(num_local_steps=3, batch_size=2),
        Spy(inputs=torch.zeros(12, 3), targets=torch.zeros(12)),
    )
    clip = RecordClip(clip_norm=0.25, step=0.0)
    train = ClippedSteps(model=model, steps=steps, record_clip=clip, step_size=0.1, loss=BINARY)
    drawn = []
    for _ in range(100):
        seen: list[int] = []
        list(train.rows(model.vector, [ClientJob(name="", records=spy, seed=0, secret=np.random.default_rng)]))
        assert len(seen) == len(set(seen)) == 6
        drawn.append(tuple(seen))
    assert len(set(drawn)) > 95
    # Every record with probability 1/2, and every step's place alike: 5 sigma of a binomial over 100 draws.
    counts = np.zeros((12, 3))
    for seen in drawn:
        for place, record in enumerate(seen):
            counts[record, place // 2] += 1
    assert np.abs(counts - 100 / 6).max() < 5 * math.sqrt(100 / 6 * 5 / 6)
