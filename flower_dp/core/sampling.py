"""Sampling: the cohort of a round, and the privacy event of a release on the cohort.

Cohorts are sampled with a generator that nobody else can replay: sampling amplifies privacy only against adversaries who do not
know the cohort.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np

from flower_dp.core import checks, dp_events

# Largest probability of a Poisson cohort so large that it is drawn again. Over 10^6 rounds that is 1e-12, the part of delta that
# the accountant reserves for rounding.
_REDRAWN = 1e-18


class Sampler(Protocol):
    """A rule that selects each round's cohort, with its expected size and its effect on the cost of a release."""

    def sample(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the sorted indices of the clients of round 1, 2, ..."""

    def expected_cohort_size(self, num_clients: int) -> float:
        """Return the expected number of clients in a round: the public denominator of the mean."""

    def max_cohort_size(self, num_clients: int) -> int:
        """Return the largest number of clients in a round, a public number."""

    @property
    def cohort_size_is_secret(self) -> bool:
        """Whether the number of clients in a round is random, and `event` is valid only if nobody knows the number."""

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        """Return a round's event for the client with the largest cost; `release` is the event of a participant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSampling:
    """Every client, every round: no amplification.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.sampling import FullSampling
        >>> FullSampling().sample(1, 4, np.random.default_rng()).tolist()
        [0, 1, 2, 3]
    """

    cohort_size_is_secret: ClassVar[bool] = False

    def sample(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return all clients."""
        return np.arange(num_clients)

    def expected_cohort_size(self, num_clients: int) -> float:
        """Return the number of clients."""
        return float(num_clients)

    def max_cohort_size(self, num_clients: int) -> int:
        """Return the number of clients."""
        return num_clients

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        """Return the release's own event."""
        return release


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonSampling:
    """Every client independently with probability `sampling_rate`, as the Poisson accountants assume.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> sampling = PoissonSampling(sampling_rate=0.1)
        >>> sampling.expected_cohort_size(1000)
        100.0
        >>> sampling.event(GaussianDpEvent(1.0), server_round=1, num_clients=1000)
        PoissonSampledDpEvent(sampling_probability=0.1, event=GaussianDpEvent(noise_multiplier=1.0))
    """

    cohort_size_is_secret: ClassVar[bool] = True
    sampling_rate: float

    def __post_init__(self) -> None:
        checks.number("sampling_rate", self.sampling_rate, above=0, at_most=1)

    def sample(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return a cohort of random size, possibly empty; one larger than `max_cohort_size` is drawn again."""
        largest = self.max_cohort_size(num_clients)
        while True:
            chosen = np.flatnonzero(rng.random(num_clients) < self.sampling_rate)
            if len(chosen) <= largest:
                return chosen

    def expected_cohort_size(self, num_clients: int) -> float:
        """Return sampling_rate x num_clients."""
        return self.sampling_rate * num_clients

    def max_cohort_size(self, num_clients: int) -> int:
        """Return a size that a cohort exceeds with a probability of at most 1e-18."""
        return _largest_cohort(self.sampling_rate, num_clients)

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        """Return the Poisson-sampled event; a round with an empty cohort costs the same."""
        if isinstance(release, dp_events.NonPrivateDpEvent) or self.sampling_rate == 1:
            return release
        return dp_events.PoissonSampledDpEvent(float(self.sampling_rate), release)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfOneSize:
    """A sampler whose cohorts have one public size."""

    cohort_size_is_secret: ClassVar[bool] = False
    cohort_size: int

    def __post_init__(self) -> None:
        checks.integer("cohort_size", self.cohort_size, at_least=1)

    def expected_cohort_size(self, num_clients: int) -> float:
        """Return cohort_size."""
        return float(self.max_cohort_size(num_clients))

    def max_cohort_size(self, num_clients: int) -> int:
        """Return cohort_size, which must be at most `num_clients`."""
        return checks.integer("cohort_size", self.cohort_size, at_least=1, at_most=num_clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSizeSampling(_OfOneSize):
    """Exactly `cohort_size` clients, drawn uniformly without replacement; accounted as such, under replace-one.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.sampling import FixedSizeSampling
        >>> len(FixedSizeSampling(cohort_size=3).sample(1, 10, np.random.default_rng()))
        3
    """

    def sample(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return a uniformly random subset."""
        return np.sort(rng.choice(num_clients, self.max_cohort_size(num_clients), replace=False))

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        """Return the event of a release on a subset drawn without replacement."""
        size = self.max_cohort_size(num_clients)
        if isinstance(release, dp_events.NonPrivateDpEvent) or size == num_clients:
            return release
        return dp_events.SampledWithoutReplacementDpEvent(num_clients, size, release)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinSampling(_OfOneSize):
    """`cohort_size` clients a round in a fixed public order: participations differ by at most one; no amplification.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.sampling import RoundRobinSampling
        >>> sampling = RoundRobinSampling(cohort_size=2)
        >>> [sampling.sample(server_round, 4, np.random.default_rng()).tolist() for server_round in (1, 2, 3)]
        [[0, 1], [2, 3], [0, 1]]
        >>> sampling.participations(num_rounds=3, num_clients=4)
        2
    """

    def sample(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the next clients in order."""
        size = self.max_cohort_size(num_clients)
        start = (server_round - 1) * size
        return np.sort(np.arange(start, start + size) % num_clients)

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        """Return the release's event if this round raises the largest number of participations, else an event without cost."""
        grows = self.participations(server_round, num_clients) > self.participations(server_round - 1, num_clients)
        return release if grows else dp_events.NoOpDpEvent()

    def participations(self, num_rounds: int, num_clients: int) -> int:
        """Return the largest number of participations of a client after `num_rounds` rounds: ceil(m T / N)."""
        return -(-num_rounds * self.max_cohort_size(num_clients) // num_clients)


def check_sampler(sampling: Sampler) -> None:
    """Refuse an object that is not a sampler.

    Raises:
        ValueError: naming the value.
    """
    if not all(
        hasattr(sampling, word)
        for word in ("sample", "event", "expected_cohort_size", "max_cohort_size", "cohort_size_is_secret")
    ):
        raise checks.bad("sampling", sampling, "a sampler of flower_dp.core.sampling, such as PoissonSampling")


@lru_cache(maxsize=64)
def _largest_cohort(sampling_rate: float, num_clients: int) -> int:
    from scipy import special  # noqa: PLC0415  (slow to import)

    def is_enough(size: int) -> bool:
        # The binomial tail, the probability of more than `size` clients, is an incomplete beta function.
        return size == num_clients or bool(special.betainc(size + 1, num_clients - size, sampling_rate) <= _REDRAWN)

    return bisect.bisect_left(range(num_clients + 1), True, key=is_enough)
