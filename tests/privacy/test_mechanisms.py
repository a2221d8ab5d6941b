"""The mechanisms: which noise they draw, which norm it is for, and the event that it leaves."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent

from flower_dp.core import noise
from flower_dp.privacy.mechanisms import Gaussian, Laplace


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


@pytest.mark.parametrize(("kind", "draw", "norm"), [(Gaussian, noise.gaussian, "l2"), (Laplace, noise.laplace, "l1")])
def test_noise_is_that_of_the_name_and_its_scale_is_the_one_asked_for(kind: Any, draw: Any, norm: str) -> None:
    """The multiplier is for the event: who draws has already multiplied it with the clip norm."""
    mechanism = kind(noise_multiplier=7.0)
    assert mechanism.norm == norm
    drawn = mechanism.noise(np.zeros(100), 3.0, 2.0**-9, np.random.default_rng(1))
    np.testing.assert_array_equal(drawn, draw(np.zeros(100), 3.0, 2.0**-9, np.random.default_rng(1)))
    assert drawn.any()
