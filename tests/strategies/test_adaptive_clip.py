"""Adaptive clipping: a clip norm that moves by noised indicators, at the cost of a fixed one."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from flower_dp.clients import ClientPolicy, privacy_mod
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.reply import client_level
from flower_dp.clients.reply.parts import IndicatorClip
from flower_dp.clients.reply.pipeline import ClientJob, Refusal
from flower_dp.core.noise import noise_generator
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.strategies import AdaptiveClip, DPFedAvg, DPFedSAM, FedSMP
from flower_dp.strategies.releases.adaptive_clip import ClipController
from flower_dp.strategies.releases.noised_sum import SumState
from flower_dp.wire import Indicator, Instruction, Promise, ReleaseRequest
from tests.asks import forged, replace
from tests.charges import charge
from tests.grids import LocalGrid
from tests.limits import accepted
from tests.releases import ask, noised, round_of
from tests.stock import arrays, stock_app

CLIP = AdaptiveClip(initial_clip_norm=0.5, min_clip_norm=0.01, max_clip_norm=100.0)
WORDS: dict[str, Any] = {
    "clip_norm": CLIP,
    "noise_multiplier": 2.0,
    "sampling": FullSampling(),
    "num_clients": 100,
    "delta": 1e-3,
}
NAMES = tuple(f"c{place}" for place in range(100))


def moving(noise_multiplier: float = 2.0, cohort: float = 100.0, **arguments: Any) -> ClipController:
    return ClipController(of=replace(CLIP, **arguments), noise_multiplier=noise_multiplier, expected_cohort_size=cohort)


class Rows:
    """Training that makes these updates, of any library."""

    def __init__(self, *updates: Any) -> None:
        self.updates = updates

    def rows(self, vector: Any, jobs: Any) -> Any:
        return ((update, np.zeros(())) for update in self.updates)


def sent(asked: ReleaseRequest, *updates: Any) -> list[Any]:
    """Return what clients with these updates send."""
    made = client_level.pipeline(asked, train=Rows(*updates), length=updates[0].shape[0])
    jobs = [ClientJob(name=str(place), records=[], seed=0, secret=noise_generator) for place in range(len(updates))]  # type: ignore[arg-type]
    return [one if isinstance(one, Refusal) else one.row for one in made.replies(np.zeros(3), jobs)]


# Privacy


@pytest.mark.parametrize("sampling", [FullSampling(), PoissonSampling(sampling_rate=0.2)])
@pytest.mark.parametrize("kind", [DPFedAvg, DPFedSAM, FedSMP])
def test_epsilon_is_that_of_a_fixed_clip_to_the_last_digit(kind: Any, sampling: Any) -> None:
    answer = set()
    for clip_norm in (0.5, CLIP, replace(CLIP, count_noise_std=1.2)):
        strategy = kind(**WORDS | {"clip_norm": clip_norm, "sampling": sampling})
        for _ in range(7):
            charge(strategy, NAMES[:20])
        answer.add((strategy.epsilon, *(one.epsilon for one in strategy.statement.adversaries)))
    ((epsilon, *_),) = answer
    assert 0 < epsilon < math.inf


@pytest.mark.parametrize("z", [0.3, 2.0, 9.0])
@pytest.mark.parametrize("count_noise_std", [None, 4.6, 50.0])
def test_noise_on_update_and_count_is_that_of_one_gaussian_around_their_joint_norm(
    z: float, count_noise_std: float | None
) -> None:
    """Andrew et al. 2021, Theorem 1: z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)."""
    clip = moving(z, count_noise_std=count_noise_std)
    made, sigma_b = clip.indicator(0.7), clip.count_noise_std
    assert sigma_b == (count_noise_std or max(5.0, z))
    z_delta = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
    assert made.joint_norm == pytest.approx(0.7 * z_delta / z, rel=1e-9)
    assert made.joint_norm >= math.hypot(0.7, made.scale / 2)
    std = z * made.joint_norm
    assert std / made.scale == pytest.approx(sigma_b, rel=1e-9)
    assert std / 0.7 == pytest.approx(z_delta, rel=1e-9)


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_no_client_moves_the_sum_by_more_than_the_joint_norm(placement: str, library: Any) -> None:
    """By search over updates: small, at the clip norm, above it, far above, in one or all coordinates."""
    asked = ask(DPFedSAM(**WORDS, placement=placement).rules.training, 4, NAMES)
    asked = replace(asked, noise_std=0.0, promise=replace(asked.promise, noise_multiplier=0.0))
    rng = np.random.default_rng(3)
    directions = [np.eye(4)[0], np.full(4, 0.5), *rng.standard_normal((20, 4))]
    norms = [0.0, 1e-30, 0.25, 0.4999999, 0.5, 0.5000001, 0.7, 1e3, 1e30]
    updates = [library((one / np.linalg.norm(one) * norm).astype(np.float32)) for one in directions for norm in norms]
    rows = [np.asarray(row, np.float64) for row in sent(asked, *updates)]
    longest = max(float(np.linalg.norm(row)) for row in rows)
    assert 0.99 * asked.promise.clip_norm < longest <= asked.promise.clip_norm
    assert asked.indicator is not None
    half = asked.indicator.scale / 2
    for update, row in zip(updates, rows, strict=True):
        within = np.linalg.norm(np.asarray(update, np.float64)) <= 0.5
        assert row[-1] == pytest.approx(half if within else -half, rel=0.01)
        assert abs(row[-1]) <= half
        assert np.linalg.norm(row[:-1]) <= 0.5
        if asked.step:
            assert (row / asked.step == np.rint(row / asked.step)).all()


def test_the_noise_of_the_last_coordinate_alone() -> None:
    made = DPFedAvg(**WORDS).rules.training
    asked = ask(made, 1, NAMES)
    steps = []
    for _ in range(6000):
        _, after = noised(made, asked, np.zeros(2), NAMES)
        assert after.clip_norm is not None
        steps.append(math.log(after.clip_norm / 0.5) / -0.2 * 100)
    assert np.std(steps) == pytest.approx(5.0, rel=0.05)
    assert abs(np.mean(steps)) < 0.3


def test_noise_and_limits_follow_from_what_was_asked_not_from_a_clip_norm_that_has_moved_since() -> None:
    made, moved = DPFedAvg(**WORDS).rules.training, SumState(clip_norm=50.0)
    asked = ask(made, 2000, NAMES)
    assert made.limits(round_of(asked, 2000, NAMES)).clip_norm == 0.5
    mean, after = noised(made, asked, np.zeros(2001), NAMES, state=moved)
    assert np.std(mean) * 100 == pytest.approx(2.0 * asked.promise.clip_norm, rel=0.1)
    assert made.clip_norm(after) < 1.0
    assert ask(made, 2000, NAMES, after).promise.clip_norm == pytest.approx(after.clip_norm * asked.promise.clip_norm / 0.5)


def test_a_lying_client_moves_the_quantile_no_further_than_an_honest_one() -> None:
    asked = ask(DPFedAvg(**WORDS).rules.training, 4, NAMES)
    assert asked.indicator is not None
    limits = DPFedAvg(**WORDS).rules.training.limits(round_of(asked, 4, NAMES))
    half = asked.indicator.scale / 2
    for lie in (1e9, 1.0, -1.0, -1e9):
        row = accepted(limits, np.array([3.0, 0.0, 0.0, 0.0, lie]), ["a"])
        assert 0.99 * half < abs(row[-1]) <= half
        assert np.linalg.norm(row[:-1]) <= 0.5
        assert np.linalg.norm(row) <= asked.promise.clip_norm
        both = accepted(limits, np.array([3.0, 0.0, 0.0, 0.0, lie]), ["a", "b"])
        assert 0.99 * 2 * half < abs(both[-1]) <= 2 * half
        assert 0.99 < np.linalg.norm(both[:-1]) <= 1.0
    shares = DPFedSAM(**WORDS).rules.training
    asked = ask(shares, 10_000, NAMES)
    limits = shares.limits(round_of(asked, 10_000, NAMES))
    row = np.zeros(10_001)
    for lie in (1.0, -1.0):
        row[-1] = lie * 2.1
        with pytest.raises(ValueError, match="further from 0 than that of any honest update"):
            accepted(limits, row, ["a"])
        row[-1] = lie * half
        assert accepted(limits, row, ["a"])[-1] == pytest.approx(lie * half, abs=asked.step)


def test_an_update_that_is_not_finite_is_refused_as_ever() -> None:
    asked = ask(DPFedAvg(**WORDS).rules.training, 3, NAMES)
    for bad in (np.nan, np.inf):
        (refusal,) = sent(asked, np.array([bad, 1.0, 0.0], np.float32))
        assert isinstance(refusal, Refusal)
        with pytest.raises(ValueError, match="NaN"):
            IndicatorClip(indicator=asked.indicator, step=0.0)(np.array([bad, 0.0]))  # type: ignore[arg-type]


# Where it moves


def training(norms: Any) -> Any:
    """What stock clients do whose updates have these norms."""

    def train(node: int, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: (value + norms[node - 1] / math.sqrt(value.size)).astype(np.float32) for name, value in given.items()}

    return train


def run(norms: np.ndarray, clip: AdaptiveClip, *, rounds: int, noise_multiplier: float = 0.5) -> DPFedAvg:
    grid = LocalGrid(stock_app(training(norms)), len(norms))
    strategy = DPFedAvg(**WORDS | {"clip_norm": clip, "noise_multiplier": noise_multiplier, "num_clients": len(norms)})
    strategy.start(grid, arrays(w=np.zeros(16, np.float32)), num_rounds=rounds)
    return strategy


def test_it_stays_within_its_limits() -> None:
    for norm, limit in ((5.0, 1.25), (0.05, 0.75)):
        strategy = run(np.full(10, norm), AdaptiveClip(initial_clip_norm=1.0, min_clip_norm=0.75, max_clip_norm=1.25), rounds=12)
        assert strategy.rules.clip_norm(strategy.state) == limit
    clip = moving(1e4, cohort=1.0)
    for mean in (1e300, -1e300):
        assert clip.next_clip_norm(clip.indicator(1.0), mean) == pytest.approx(0.01 if mean > 0 else 100.0)


def test_without_noise_the_step_is_that_of_the_paper() -> None:
    """C exp(-eta (b - gamma)), b the part of the expected cohort within the clip norm."""
    strategy = run(np.array([0.1, 0.2, 0.3, 1.0]), CLIP, rounds=1, noise_multiplier=0.0)
    assert strategy.rules.clip_norm(strategy.state) == pytest.approx(0.5 * math.exp(-0.2 * (0.75 - 0.5)), rel=1e-5)
    strategy = run(np.array([0.1, 8.0, 8.0, 9.0, 9.0]), replace(CLIP, target_quantile=0.9), rounds=1, noise_multiplier=0.0)
    assert strategy.rules.clip_norm(strategy.state) == pytest.approx(0.5 * math.exp(-0.2 * (0.2 - 0.9)), rel=1e-5)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"initial_clip_norm": 1e3}, "initial_clip_norm"),
        ({"min_clip_norm": 0.0}, "min_clip_norm"),
        ({"max_clip_norm": 0.001}, "max_clip_norm"),
        ({"target_quantile": 1.0}, "target_quantile"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"count_noise_std": 0.0}, "count_noise_std"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(CLIP, **arguments)


def test_too_little_noise_on_the_count_is_refused() -> None:
    for std in (0.5, 1.0):
        with pytest.raises(ValueError, match=r"count_noise_std=.*must be more than 1"):
            DPFedAvg(**WORDS | {"clip_norm": replace(CLIP, count_noise_std=std)})
    DPFedAvg(**WORDS | {"clip_norm": replace(CLIP, count_noise_std=1.01)})


def test_lossy_messages_are_refused_before_any_client_is_asked() -> None:
    for arguments in ({"keep_ratio": 0.5}, {"quantization_levels": 4}):
        with pytest.raises(ValueError, match="does not work with keep_ratio"):
            DPFedSAM(**WORDS, **arguments)


def test_central_selection_is_of_the_update_alone() -> None:
    made = DPFedSAM(**WORDS, placement="central", keep_ratio=0.25).rules.training
    mean, _ = noised(made, ask(made, 8, NAMES), np.zeros(9), NAMES)
    assert mean.shape == (8,)
    assert np.count_nonzero(mean) == 2


PROMISE = Promise(clip_norm=5.0, noise_multiplier=1.0)
INDICATOR = Indicator(clip_norm=4.0, scale=6.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"promise": Promise(clip_norm=4.999, noise_multiplier=1.0)},
        {"placement": "local"},
        {"placement": "distributed", "noise_std": 1.0, "keep_ratio": 0.5},
        {"placement": "distributed", "noise_std": 1.0, "quantization_levels": 3},
    ],
)
def test_asks_that_make_no_sense_with_an_indicator_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"indicator"):
        ReleaseRequest(**{"promise": PROMISE, "placement": "central", "indicator": INDICATOR} | arguments)


@pytest.mark.parametrize(
    "table",
    [
        *(3, {}, {"clip_norm": 1.0}, {"clip_norm": -1.0, "scale": 1.0}, {"clip_norm": 1.0, "scale": 0.0}),
        {"clip_norm": 1.0, "scale": 2.0**127 * (1 + 2**-52)},
    ],
)
def test_forged_indicators_are_refused(table: Any) -> None:
    asked = ReleaseRequest(promise=PROMISE, placement="central", indicator=INDICATOR)
    instruction = Instruction(server_round=1, method="dp-fedavg", clients=("a",), ask=asked)
    with pytest.raises(ValueError, match="indicator"):
        Instruction.from_json(forged(instruction, indicator=table))
    if isinstance(table, dict) and len(table) == 2:
        with pytest.raises(ValueError, match="indicator"):
            Indicator(**table)


# Policies


def test_a_policy_limits_the_clip_norm_of_the_round_on_both_sides() -> None:
    policy = ClientPolicy(max_clip_norm=4.0, min_clip_norm=2.0, min_noise_multiplier=0.5)
    policy.check(ReleaseRequest(promise=PROMISE, placement="central", indicator=INDICATOR))
    for changes in (
        {"indicator": Indicator(clip_norm=4.1, scale=6.0)},
        {"indicator": Indicator(clip_norm=1.9, scale=6.0)},
        {"promise": Promise(clip_norm=1.0, noise_multiplier=1.0)},
    ):
        with pytest.raises(Declined, match="clip_norm"):
            policy.check(
                ReleaseRequest(**{"promise": Promise(clip_norm=6.0, noise_multiplier=1.0), "placement": "central"} | changes)
            )


def test_a_policy_holds_the_noise_on_the_device_against_the_whole_row() -> None:
    """The same share under a larger row protects less; a server that scales the indicator up gets nothing."""
    policy = ClientPolicy(max_clip_norm=4.0, min_noise_std=2.0)

    def check(clip_norm: float, noise_std: float, indicator: Indicator) -> None:
        promise = Promise(clip_norm=clip_norm, noise_multiplier=1.0)
        policy.check(ReleaseRequest(promise=promise, placement="distributed", noise_std=noise_std, indicator=indicator))

    check(5.0, 2.5, INDICATOR)
    check(0.5, 0.25, Indicator(clip_norm=0.4, scale=0.6))  # a row of a tenth with a tenth of the noise is as well protected
    for bad in ((5.0, 2.49, INDICATOR), (301.0, 2.5, replace(INDICATOR, scale=600.0))):
        with pytest.raises(Declined, match="noise_std"):
            check(*bad)


# Through this package's clients


@pytest.mark.parametrize("placement", ["central", "distributed"])
def test_under_a_mask_the_indicator_is_of_the_kept_coordinates_and_always_sent(placement: str) -> None:
    made = FedSMP(**WORDS, keep_ratio=0.25, placement=placement).rules.training
    asked = ask(made, 1000, NAMES)
    assert asked.mask is not None
    assert asked.indicator is not None
    kept = asked.mask.indices(1000)
    assert len(kept) == 250
    inside, outside = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    outside[np.setdiff1d(np.arange(1000), kept)] = 9.0
    inside[kept] = 9.0
    quiet = replace(asked, noise_std=0.0, promise=replace(asked.promise, noise_multiplier=0.0))
    rows = sent(quiet, inside, outside)
    assert [row.shape for row in rows] == [(251,), (251,)]
    half = asked.indicator.scale / 2
    assert [float(row[-1]) for row in rows] == pytest.approx([-half, half], rel=0.01)
    limits = made.limits(round_of(asked, 1000, NAMES))
    assert limits.mask is not None
    np.testing.assert_array_equal(limits.mask, [*kept, 1000])
    mean, after = noised(made, asked, np.zeros(1001), ())  # no client has added its share
    assert set(np.flatnonzero(mean)) <= set(kept)
    assert made.clip_norm(after) != 0.5
    assert made.num_kept(1001) == 251


def test_a_run_of_own_clients_moves_the_right_way() -> None:
    """Clients of `privacy_mod` around an app of somebody else."""
    policy = ClientPolicy(max_clip_norm=100.0, min_clip_norm=0.01, min_noise_multiplier=0.4)
    grid = LocalGrid(stock_app(training([2.0] * 20), mods=[privacy_mod(policy=policy)]), 20)
    strategy = FedSMP(**WORDS | {"num_clients": 20, "noise_multiplier": 0.5, "clip_norm": replace(CLIP, initial_clip_norm=0.1)})
    strategy.start(grid, arrays(w=np.zeros(16, np.float32)), num_rounds=8)
    path = [report.public()["clip-norm"] for report in strategy.rounds]
    assert path[0] == 0.1
    assert path[-1] > 0.15
    assert not strategy.missing.total
    (line,) = [line for line in strategy.statement.assumptions if line.startswith("Adaptive clipping: ")]
    assert "one release under one noise holds the update and an indicator of whether it was clipped" in line
    noise = strategy.statement.noise
    assert (noise["initial_clip_norm"], noise["min_clip_norm"], noise["max_clip_norm"]) == (0.1, 0.01, 100.0)
    assert (noise["target_quantile"], noise["count_noise_std"]) == (0.5, 1.0)
