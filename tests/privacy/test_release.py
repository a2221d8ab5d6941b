"""A release: noise and event are both derived, and nothing else can be configured."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from flower_dp.core import dp_events
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.privacy.release import Release
from tests.closed_forms import gaussian_epsilon

RELEASE = Release(
    description="sums",
    visible_to="everyone",
    unit="client",
    relation="add-or-remove-one",
    clip_norm=0.3,
    mechanism=Gaussian(noise_multiplier=1.5),
    sampler=PoissonSampling(sampling_rate=0.1),
    num_units=50,
)


def _release(**changes: Any) -> Release:
    return dataclasses.replace(RELEASE, **changes)


def test_noise_and_event_are_derived_from_one_multiplier() -> None:
    assert RELEASE.noise_scale == pytest.approx(0.45, rel=1e-15)
    assert RELEASE.event(1) == dp_events.PoissonSampledDpEvent(0.1, dp_events.GaussianDpEvent(1.5))
    assert RELEASE.expected_cohort_size == 5
    assert RELEASE.events(4) == dp_events.ComposedDpEvent([RELEASE.event(1)] * 4)
    with pytest.raises((AttributeError, TypeError)):
        RELEASE.clip_norm = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("multiplier", [0.5, 2.0])
@pytest.mark.parametrize("clip_norm", [0.1, 7.0])
@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
def test_epsilon_is_what_the_noise_over_the_sensitivity_gives(multiplier: float, clip_norm: float, relation: Any) -> None:
    mechanism = Gaussian(noise_multiplier=multiplier)
    release = _release(clip_norm=clip_norm, mechanism=mechanism, relation=relation, sampler=FullSampling())
    by_hand = gaussian_epsilon([release.noise_scale / release.sensitivity], "add-or-remove-one", 1e-5)
    assert accounting.epsilon(release.event(1), delta=1e-5, relation=relation).epsilon == pytest.approx(by_hand, rel=1e-9)


def test_a_replacement_moves_the_sum_twice_as_far() -> None:
    assert RELEASE.sensitivity == 0.3
    assert _release(relation="replace-one").sensitivity == 0.6
    # The noise is the same: noise_multiplier means noise std / clip norm under both.
    assert _release(relation="replace-one").noise_scale == RELEASE.noise_scale


def test_fixed_size_is_accounted_under_replace_one() -> None:
    release = _release(sampler=FixedSizeSampling(cohort_size=5), relation="replace-one")
    assert release.event(1) == dp_events.SampledWithoutReplacementDpEvent(50, 5, dp_events.GaussianDpEvent(1.5))
    assert release.expected_cohort_size == 5


def test_round_robin_charges_the_client_that_took_part_most_often() -> None:
    release = _release(sampler=RoundRobinSampling(cohort_size=20))
    events = [release.event(number) for number in range(1, 8)]
    # After 1, 2, ... rounds of 20 of 50 clients: ceil(0.4), ceil(0.8), ceil(1.2), ceil(1.6), 2, ceil(2.4), ceil(2.8).
    most = [1, 1, 2, 2, 2, 3, 3]
    assert [isinstance(event, dp_events.NoOpDpEvent) for event in events] == [False, True, False, True, True, False, True]
    assert [sum(event == dp_events.GaussianDpEvent(1.5) for event in events[:n]) for n in range(1, 8)] == most


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        *(({"clip_norm": value}, f"clip_norm={value}: must be a finite number > 0") for value in (0, -1.0, math.nan, math.inf)),
        *(({"num_units": value}, f"num_units={value}: must be a whole number >= 1") for value in (0, 2.5)),
        ({"relation": "add"}, "relation='add': must be one of add-or-remove-one, replace-one"),
        ({"sampler": FixedSizeSampling(cohort_size=5)}, "no accountant bounds it under relation='add-or-remove-one'"),
        ({"sampler": FixedSizeSampling(cohort_size=51), "relation": "replace-one"}, "cohort_size=51: .* <= 50"),
        ({"sampler": RoundRobinSampling(cohort_size=51)}, "cohort_size=51: .* <= 50"),
    ],
)
def test_combinations_that_nothing_bounds_are_refused(changes: dict[str, Any], arguments: str) -> None:
    with pytest.raises(ValueError, match=arguments):
        _release(**changes)


@pytest.mark.parametrize(("multiplier", "num_refused"), [(0.0, 0), (1e-60, 0), (1e-3, 2), (1.5, 2)])
def test_what_is_known_to_be_bounded_without_an_accountant_is_bounded_by_one(multiplier: float, num_refused: int) -> None:
    poisson = (PoissonSampling(sampling_rate=rate) for rate in (0.1, 1.0))
    samplers = (FullSampling(), *poisson, FixedSizeSampling(cohort_size=5), RoundRobinSampling(cohort_size=5))
    refused = 0
    for kind, sampler, relation in itertools.product((Gaussian, Laplace), samplers, ("add-or-remove-one", "replace-one")):
        mechanism = kind(noise_multiplier=multiplier)
        try:
            release = _release(mechanism=mechanism, sampler=sampler, relation=relation)
        except accounting.UnsupportedEventError:
            refused += 1
            with pytest.raises(accounting.UnsupportedEventError):
                accounting.check(sampler.event(mechanism.event(), 1, 50), relation=relation)
        else:
            accounting.check(release.event(1), relation=relation)
    # Fixed-size sampling under add-or-remove-one. (What has hardly any noise has no privacy, whatever draws the sample.)
    assert refused == num_refused


class _Twice(PoissonSampling):
    """A user's sampler, with an event that no accountant knows."""

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        return dp_events.SampledWithReplacementDpEvent(num_clients, 5, release)


class _Unchecked(RoundRobinSampling):
    """A user's sampler, whose event asks for no number of clients."""

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        return release


def test_a_users_sampler_too_is_asked_whether_its_cohort_fits() -> None:
    with pytest.raises(ValueError, match=r"cohort_size=51: .* <= 50"):
        _release(sampler=_Unchecked(cohort_size=51))


class _TwiceGaussian(Gaussian):
    """A user's mechanism, with an event that no accountant knows."""

    def event(self) -> dp_events.DpEvent:
        return dp_events.SampledWithReplacementDpEvent(50, 5, dp_events.GaussianDpEvent(self.noise_multiplier))


@pytest.mark.parametrize("changes", [{"sampler": _Twice(sampling_rate=0.1)}, {"mechanism": _TwiceGaussian(noise_multiplier=1.0)}])
def test_an_accountant_is_asked_about_what_users_have_changed(changes: dict[str, Any]) -> None:
    with pytest.raises(accounting.UnsupportedEventError):
        _release(**changes)
