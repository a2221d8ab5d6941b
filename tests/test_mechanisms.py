"""Noise: its distribution, its independence, its source of randomness, its event.

The statistical tests use fixed seeds; for a random seed each would raise a false alarm with probability 1e-6, and each is
shown to reject a scale that is wrong by 5 %.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent
from scipy import stats

from flower_dp.mechanisms import Gaussian, Laplace, gaussian_share, noise_generator

FALSE_ALARM = 1e-6
SIZE = 200_000  # so many that a 5 % wrong scale is rejected with near certainty
MECHANISMS: dict[str, Any] = {"gaussian": Gaussian(noise_multiplier=1.0), "laplace": Laplace(noise_multiplier=1.0)}
DISTRIBUTIONS: dict[str, Any] = {"gaussian": stats.norm, "laplace": stats.laplace}
# (what the noise is like, generator)
SOURCES: dict[str, Any] = {
    "numpy": lambda shape, seed: (np.zeros(shape, np.float32), np.random.default_rng(seed)),
    "numpy-float64": lambda shape, seed: (np.zeros(shape), np.random.default_rng(seed)),
    "torch": lambda shape, seed: (torch.zeros(shape), torch.Generator().manual_seed(seed)),
    "torch-float16": lambda shape, seed: (torch.zeros(shape, dtype=torch.float16), torch.Generator().manual_seed(seed)),
    "torch-numpy-generator": lambda shape, seed: (torch.zeros(shape), np.random.default_rng(seed)),
}


def _fits(noise: Any, name: str, scale: float) -> bool:
    """Whether the values look like the named distribution of this scale (Kolmogorov-Smirnov)."""
    values = np.asarray(noise, np.float64).ravel()
    return bool(stats.kstest(values, DISTRIBUTIONS[name](0, scale).cdf).pvalue > FALSE_ALARM)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Any:
    return SOURCES[request.param]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("scale", [3e-4])
def test_noise_has_the_right_distribution_and_a_wrong_one_is_rejected(name: str, scale: float, source: Any) -> None:
    like, rng = source((SIZE,), 11)
    noise = MECHANISMS[name].noise(like, scale, rng)
    assert _fits(noise, name, scale)
    assert not _fits(noise, name, 1.05 * scale)
    assert not _fits(noise, name, 0.95 * scale)
    assert not _fits(noise, "laplace" if name == "gaussian" else "gaussian", scale)


@pytest.mark.parametrize(("name", "std"), [("gaussian", 1.0), ("laplace", math.sqrt(2))])
def test_mean_and_standard_deviation(name: str, std: float, source: Any) -> None:
    like, rng = source((SIZE,), 12)
    noise = np.asarray(MECHANISMS[name].noise(like, 2.0, rng), np.float64)
    z = stats.norm.isf(FALSE_ALARM / 2)
    assert abs(noise.mean()) < z * 2 * std / math.sqrt(SIZE)
    # The variance's relative error is sqrt((kurtosis - 1) / n): kurtosis 3 for Gaussian, 6 for Laplace noise.
    band = z * math.sqrt(({"gaussian": 3, "laplace": 6}[name] - 1) / SIZE)
    assert abs(noise.var() / (2 * std) ** 2 - 1) < band
    assert band < 1.05**2 - 1  # so a 5 % wrong scale would fail


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_is_independent_across_coordinates_and_draws(name: str, source: Any) -> None:
    like, rng = source((SIZE,), 13)
    first = np.asarray(MECHANISMS[name].noise(like, 1.0, rng), np.float64)
    second = np.asarray(MECHANISMS[name].noise(like, 1.0, rng), np.float64)
    # Five correlations, each of std 1 / sqrt(n) were the noise independent.
    band = stats.norm.isf(FALSE_ALARM / 10) / math.sqrt(SIZE - 2)
    pairs = [(first, second), (first[1:], first[:-1]), (first[2:], first[:-2]), (np.abs(first), np.abs(second))]
    pairs.append((np.abs(first[1:]), np.abs(first[:-1])))
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < band
    assert np.unique(first).size > 0.8 * SIZE


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (4, 0)])
def test_noise_has_the_shape_library_and_dtype_asked_for(name: str, shape: tuple[int, ...], source: Any) -> None:
    like, rng = source(shape, 14)
    noise = MECHANISMS[name].noise(like, 1.0, rng)
    assert tuple(noise.shape) == shape
    assert isinstance(noise, torch.Tensor) == isinstance(like, torch.Tensor)
    assert str(noise.dtype).endswith("float32")


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_of_scale_zero_is_zero(name: str, source: Any) -> None:
    like, rng = source((50,), 15)
    assert not np.asarray(MECHANISMS[name].noise(like, 0.0, rng)).any()


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_nonsense_scales_are_refused(name: str, scale: float, source: Any) -> None:
    like, rng = source((3,), 16)
    with pytest.raises(ValueError, match=r"noise_s(td|cale)=.*>= 0"):
        MECHANISMS[name].noise(like, scale, rng)


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
@pytest.mark.parametrize("multiplier", [-0.1, math.nan, math.inf, "1", None, True])
def test_nonsense_multipliers_are_refused(kind: Any, multiplier: Any) -> None:
    with pytest.raises(ValueError, match=r"noise_multiplier=.*>= 0"):
        kind(noise_multiplier=multiplier)


def test_events_carry_the_multiplier_and_no_noise_is_not_private() -> None:
    assert Gaussian(noise_multiplier=1.25).event() == GaussianDpEvent(1.25)
    assert Laplace(noise_multiplier=1.25).event() == LaplaceDpEvent(1.25)
    assert isinstance(Gaussian(noise_multiplier=0).event(), NonPrivateDpEvent)
    assert isinstance(Laplace(noise_multiplier=0).event(), NonPrivateDpEvent)


def test_generators_without_a_seed_differ_every_time_and_with_one_repeat() -> None:
    draws = [noise_generator().standard_normal(4).tolist() for _ in range(50)]
    assert len({tuple(draw) for draw in draws}) == 50
    assert noise_generator(5).standard_normal() == noise_generator(5).standard_normal()
    # 256 bits from the operating system: states that differ in the low or high words alone would be a smaller seed.
    states = [noise_generator().bit_generator.state["state"]["state"] for _ in range(50)]
    assert len({state >> 64 for state in states}) == len({state % 2**64 for state in states}) == 50


def test_generators_ignore_the_global_seeds() -> None:
    draws = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        draws.append(noise_generator().standard_normal())
    assert draws[0] != draws[1]


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_does_not_touch_or_follow_the_global_generators(name: str, source: Any) -> None:
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    numpy_state, torch_state = np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    like, rng = source((20,), 17)
    noise_generator()
    noise = np.asarray(MECHANISMS[name].noise(like, 1.0, rng))
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy_state)  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    again, rng = source((20,), 17)
    np.testing.assert_array_equal(np.asarray(MECHANISMS[name].noise(again, 1.0, rng)), noise)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_missing_generator_is_refused(name: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        MECHANISMS[name].noise(torch.zeros(3), 1.0, None)


@pytest.mark.parametrize("shares", [1, 7, 100])
def test_shares_of_noise_sum_to_the_noise(shares: int) -> None:
    share = gaussian_share(3.0, shares)
    assert share == pytest.approx(3.0 / math.sqrt(shares), rel=1e-15)
    rng = np.random.default_rng(18)
    size = SIZE // 2
    total = np.zeros(size)
    for _ in range(shares):
        total += MECHANISMS["gaussian"].noise(total, share, rng)
    assert stats.kstest(total, stats.norm(0, 3.0).cdf).pvalue > FALSE_ALARM
    # The variance's band, at that size, is a little narrower than 5 % of the scale.
    band = stats.norm.isf(FALSE_ALARM / 2) * math.sqrt(2 / size)
    assert abs(total.var() / 9.0 - 1) < band
    assert abs((1.05 * total).var() / 9.0 - 1) > band


@pytest.mark.parametrize("shares", [0, -1, 1.5])
def test_nonsense_numbers_of_shares_are_refused(shares: Any) -> None:
    with pytest.raises(ValueError, match="num_shares="):
        gaussian_share(1.0, shares)
