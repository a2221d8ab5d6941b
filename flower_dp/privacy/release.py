"""A release: one noised quantity that crosses a trust boundary.

It holds clip norm, mechanism, sampler and neighboring relation, and derives both noise and event from them. So you can't
configure an epsilon that the noise does not provide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flower_dp.core import checks, dp_events, noise
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.events import RELATIONS, Relation
from flower_dp.privacy.mechanisms import Gaussian, Laplace, Mechanism

# Samplers whose releases an accountant bounds; those of a fixed size under replace-one only.
_BOUNDED = (FullSampling, PoissonSampling, FixedSizeSampling, RoundRobinSampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One noised quantity, with its adversary and its protection.

    Attributes:
        description: released quantity, as text.
        visible_to: everyone who sees it, as text; they are the adversary.
        unit: unit in which neighboring data sets differ: `client` (all of one client's data) or `record`.
        relation: neighboring relation.
        clip_norm: bound on the norm of one unit's contribution (L2 for Gaussian, L1 for Laplace noise).
        mechanism: noise, as a multiple of `clip_norm`.
        sampler: rule that selects the clients of a round (or, inside one client, its records).
        num_units: number of units the sampler draws from: clients, or, if the unit is a record, one client's records.

    Example:
        >>> from flower_dp.core.sampling import PoissonSampling
        >>> from flower_dp.privacy.mechanisms import Gaussian
        >>> from flower_dp.privacy.release import Release
        >>> release = Release(
        ...     description="the noised sum of clipped updates",
        ...     visible_to="everyone who sees global models",
        ...     unit="client",
        ...     relation="add-or-remove-one",
        ...     clip_norm=0.5,
        ...     mechanism=Gaussian(noise_multiplier=1.0),
        ...     sampler=PoissonSampling(sampling_rate=0.1),
        ...     num_units=1000,
        ... )
        >>> release.noise_scale, release.sensitivity, release.expected_cohort_size
        (0.5, 0.5, 100.0)
    """

    description: str
    visible_to: str
    unit: Literal["client", "record"]
    relation: Relation
    clip_norm: float
    mechanism: Mechanism
    sampler: Sampler
    num_units: int

    def __post_init__(self) -> None:
        checks.number("clip_norm", self.clip_norm, above=0)
        checks.integer("num_units", self.num_units, at_least=1)
        checks.one_of("relation", self.relation, RELATIONS)
        self.sampler.expected_cohort_size(self.num_units)  # refuses a cohort larger than the population
        if not self._can_be_bounded:
            accounting.check(self.event(1), relation=self.relation)

    @property
    def _can_be_bounded(self) -> bool:
        """Whether its types alone show that an accountant bounds this release; importing one takes a second."""
        if type(self.mechanism) not in (Gaussian, Laplace):
            return False
        if type(self.sampler) is FixedSizeSampling and self.relation != "replace-one":
            return False
        return type(self.sampler) in _BOUNDED

    @property
    def noise_scale(self) -> float:
        """Scale of the noise on the released sum: the standard deviation of Gaussian noise, the Laplace scale."""
        return self.mechanism.noise_multiplier * self.clip_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the released sum."""
        return self.noise_scale * (math.sqrt(2) if self.mechanism.norm == "l1" else 1.0)

    def lattice_step(self, dimension: int) -> float:
        """Return the step of the lattice on which contributions [d] and the noise of their sum lie; 0 without noise."""
        return noise.lattice_step(self.noise_scale, clip_norm=self.clip_norm, dimension=dimension, norm=self.mechanism.norm)

    @property
    def sensitivity(self) -> float:
        """Largest change of the released sum by one unit: the clip norm, or twice that if the unit is replaced by another."""
        return self.clip_norm * (2 if self.relation == "replace-one" else 1)

    @property
    def expected_cohort_size(self) -> float:
        """Expected number of contributions in a round."""
        return self.sampler.expected_cohort_size(self.num_units)

    def event(self, server_round: int) -> dp_events.DpEvent:
        """Return the event of one round's release (1, 2, ...) for the unit with the largest cost."""
        return self.sampler.event(self.mechanism.event(), server_round, self.num_units)

    def events(self, num_rounds: int) -> dp_events.DpEvent:
        """Return the composed event of rounds 1 to `num_rounds`."""
        return dp_events.ComposedDpEvent([self.event(server_round) for server_round in range(1, num_rounds + 1)])
