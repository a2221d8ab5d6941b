"""Sampling: which clients take part in a round, and how that wraps the event of a release.

Cohorts are drawn with a generator that nobody else can replay: amplification by sampling counts only against those who do not
know who took part.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from dp_accounting import (
    DpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)

from flower_dp import checks


class Sampler(Protocol):
    """Who takes part, how many of them are expected, and what that does to the cost of a release."""

    def choose(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the indices, sorted, of the clients of round 1, 2, ..."""

    def expected_cohort(self, num_clients: int) -> float:
        """Return the expected number of clients in a round: the public denominator of the mean."""

    def event(self, release: DpEvent, server_round: int, num_clients: int) -> DpEvent:
        """Return what a round's release costs the client whom it costs most, given what a release costs a participant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSampling:
    """Every client, every round: no amplification."""

    def choose(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return all clients."""
        return np.arange(num_clients)

    def expected_cohort(self, num_clients: int) -> float:
        """Return the number of clients."""
        return float(num_clients)

    def event(self, release: DpEvent, server_round: int, num_clients: int) -> DpEvent:
        """Return the release's own event."""
        return release


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonSampling:
    """Every client by itself with probability `sampling_rate`: what the Poisson accountants assume."""

    sampling_rate: float

    def __post_init__(self) -> None:
        checks.number("sampling_rate", self.sampling_rate, above=0, at_most=1)

    def choose(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return a cohort of random size, possibly empty."""
        return np.flatnonzero(rng.random(num_clients) < self.sampling_rate)

    def expected_cohort(self, num_clients: int) -> float:
        """Return sampling_rate x num_clients."""
        return self.sampling_rate * num_clients

    def event(self, release: DpEvent, server_round: int, num_clients: int) -> DpEvent:
        """Return the Poisson-sampled event; an empty cohort pays as well."""
        if isinstance(release, NonPrivateDpEvent) or self.sampling_rate == 1:
            return release
        return PoissonSampledDpEvent(float(self.sampling_rate), release)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSizeSampling:
    """Exactly `cohort_size` clients, uniformly without replacement; accounted as that, under replace-one."""

    cohort_size: int

    def __post_init__(self) -> None:
        checks.integer("cohort_size", self.cohort_size, at_least=1)

    def choose(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return a uniformly random subset."""
        return np.sort(rng.choice(num_clients, _cohort(self.cohort_size, num_clients), replace=False))

    def expected_cohort(self, num_clients: int) -> float:
        """Return cohort_size."""
        return float(_cohort(self.cohort_size, num_clients))

    def event(self, release: DpEvent, server_round: int, num_clients: int) -> DpEvent:
        """Return the event of a release on a subset drawn without replacement."""
        size = _cohort(self.cohort_size, num_clients)
        if isinstance(release, NonPrivateDpEvent) or size == num_clients:
            return release
        return SampledWithoutReplacementDpEvent(num_clients, size, release)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinSampling:
    """`cohort_size` clients a round in a fixed public order: participations differ by at most one; no amplification."""

    cohort_size: int

    def __post_init__(self) -> None:
        checks.integer("cohort_size", self.cohort_size, at_least=1)

    def choose(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the next clients in order."""
        size = _cohort(self.cohort_size, num_clients)
        start = (server_round - 1) * size
        return np.sort(np.arange(start, start + size) % num_clients)

    def expected_cohort(self, num_clients: int) -> float:
        """Return cohort_size."""
        return float(_cohort(self.cohort_size, num_clients))

    def event(self, release: DpEvent, server_round: int, num_clients: int) -> DpEvent:
        """Return the release's event in the rounds in which the largest number of participations grows, else nothing."""
        grows = self.participations(server_round, num_clients) > self.participations(server_round - 1, num_clients)
        return release if grows else NoOpDpEvent()

    def participations(self, num_rounds: int, num_clients: int) -> int:
        """Return how often the client asked most often has been asked after `num_rounds` rounds: ceil(m T / N)."""
        return -(-num_rounds * _cohort(self.cohort_size, num_clients) // num_clients)


def _cohort(cohort_size: int, num_clients: int) -> int:
    return checks.integer("cohort_size", cohort_size, at_least=1, at_most=num_clients)
