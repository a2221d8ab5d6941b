"""The noise of one sum of client updates: its split between server and clients, and its charges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from flower_dp.core import dp_events, noise
from flower_dp.core.noise import Generator, gaussian_share
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, RoundRobinSampling
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.left_out import RoundDiscarded

T = TypeVar("T")

# Samplers whose cohorts are public, and whose events count how often a client takes part.
_PUBLIC = (RoundRobinSampling, MinimumSeparationSampling)


class Noise(Protocol):
    """The noise of a sum: its split between server and clients, and its charges.

    Attributes:
        release: the noised sum.
        placement: `central` or `distributed`.
        compresses_noised_updates: whether clients compress their noised updates, so that the messages do not add up to the
            noised sum.
        cohort_is_secret: whether the epsilon holds only if nobody knows who takes part in a round.
        promised_multiplier: noise multiplier of the whole release, which clients are promised; if one event covers all rounds,
            that of the event.
    """

    @property
    def release(self) -> Release: ...  # noqa: D102
    @property
    def placement(self) -> str: ...  # noqa: D102
    @property
    def compresses_noised_updates(self) -> bool: ...  # noqa: D102
    @property
    def cohort_is_secret(self) -> bool: ...  # noqa: D102

    def with_clip_norm(self, clip_norm: float) -> Noise:
        """Return the same noise around another clip norm; its multiplier and its cost stay."""

    @property
    def promised_multiplier(self) -> float: ...  # noqa: D102

    def share_std(self, cohort_size: int) -> float:
        """Return the std of the noise that each of a cohort's clients adds to its own update."""

    def events(self, number: int, cohort_size: int) -> Mapping[str, dp_events.DpEvent]:
        """Return the event of charge `number` (from 1) by view: that of any single client (""), and of "outsiders".

        Noise that is correlated over rounds may have one event for the whole run at number 1, and `NoOpDpEvent` later.
        """

    def begin(self, state: Any, number: int, length: int, rng: Generator) -> tuple[Any, Any]:
        """Return the noise that is drawn before the replies, for this round alone, and the next state of the noise.

        The state is None for noise that is independent from round to round. Any other state is secret, and is on the disk before
        a message of the round leaves, so that no crash lets noise be drawn twice.

        Args:
            state: state of the noise; None before the first round.
            number: number of the release's charge, from 1.
            length: length of the noised vector.
            rng: new generator for this round.
        """

    def add(self, total: np.ndarray, begun: Any, *, step: float, num_replies: int, cohort_size: int, rng: Generator) -> None:
        """Add the server's part of the noise to the sum of the replies, in place.

        Raises:
            RoundDiscarded: if too few or too many clients replied for the noise that was charged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSharing:
    """The split of a release's Gaussian noise between server and clients, and the resulting protection by adversary.

    Under `central` placement the server draws all of it. Under `distributed` placement every client adds a share to its own
    update; the shares of the clients that reply, and any that the server adds, make up the noise of the release.

    Attributes:
        release: the noised sum.
        placement: `central` or `distributed`.
        server_completes_noise: whether the server adds every share that a round's sum lacks (never if messages are compressed).
            If not, shares are sized for the fewest replies allowed, and the accounting claims no amplification by sampling.
        min_reply_ratio: if the server does not complete the noise, the fraction of the selected clients that must reply.
        compresses_noised_updates: whether every client sends the largest coordinates or the levels of its own noised update.
            Then the sum of messages is no function of the noised sum, and each client's own share alone protects it.

    Example:
        >>> from flower_dp.core.sampling import FullSampling
        >>> release = Release(
        ...     description="the noised sum of clipped updates",
        ...     visible_to="everyone who sees global models",
        ...     unit="client",
        ...     relation="add-or-remove-one",
        ...     clip_norm=0.5,
        ...     mechanism=Gaussian(noise_multiplier=2.0),
        ...     sampler=FullSampling(),
        ...     num_units=100,
        ... )
        >>> shared = NoiseSharing(release=release, placement="distributed", server_completes_noise=True, min_reply_ratio=1.0)
        >>> shared.share_std(100), round(shared.server_std(75), 3)
        (0.1, 0.5)
    """

    release: Release
    placement: str
    server_completes_noise: bool
    min_reply_ratio: float
    compresses_noised_updates: bool = False

    def with_clip_norm(self, clip_norm: float) -> NoiseSharing:
        """Return the same noise around another clip norm; its multiplier and its cost stay."""
        return self if clip_norm == self.release.clip_norm else replace(self, release=replace(self.release, clip_norm=clip_norm))

    # Who draws what

    @property
    def total_shares(self) -> int:
        """The number of shares of the noise if the server completes it: the maximum cohort size.

        It is a public number. Shares sized by the number of selected clients would reveal that number to each of them.
        """
        return self.release.sampler.max_cohort_size(self.release.num_units)

    def min_replies(self, cohort_size: int) -> int:
        """Return how many of the selected clients must reply if the server adds no shares.

        If all cohorts have the same size, use that size. Disconnected clients do not reduce the number of shares: the round would
        cost more than planned.
        """
        drawn = min(cohort_size, self.total_shares) if self.release.sampler.cohort_size_is_secret else self.total_shares
        # `- 1e-9` undoes float rounding: 0.55 x 100 = 55.00000000000001 would demand 56 replies.
        return max(1, math.ceil(self.min_reply_ratio * drawn - 1e-9))

    def shares(self, cohort_size: int) -> int:
        """Return the number of shares that make up the noise of a round."""
        return self.total_shares if self.server_completes_noise else self.min_replies(cohort_size)

    def share_std(self, cohort_size: int) -> float:
        """Return the std of the noise that each of a cohort's clients adds to its own update."""
        if self.placement == "central":
            return 0.0
        if self.compresses_noised_updates:
            return gaussian_share(self.release.noise_scale, max(1, math.ceil(self.release.expected_cohort_size)))
        return gaussian_share(self.release.noise_scale, self.shares(cohort_size))

    @property
    def min_share_std(self) -> float:
        """The lowest std of the noise that a client adds itself in any round: 0 if the server adds all noise."""
        return self.share_std(self.total_shares)

    def server_std(self, num_replies: int) -> float:
        """Return the std of the noise that the server adds to the sum of `num_replies` updates."""
        if self.placement == "central":
            return self.release.noise_scale
        if self.reveals_cohort:
            return 0.0
        shares = self.total_shares
        # Never the root of a negative number: `above_max_replies` refuses more replies than shares, whose noise would grow with
        # the cohort and reveal its size.
        return self.release.noise_scale * math.sqrt((shares - num_replies) / shares)

    def below_min_replies(self, num_replies: int, cohort_size: int) -> bool:
        """Return whether these replies hold less noise than the release that was charged."""
        return self.placement == "distributed" and not self.server_completes_noise and num_replies < self.min_replies(cohort_size)

    def above_max_replies(self, num_replies: int) -> bool:
        """Return whether these replies hold more noise than the release: its variance would reveal how many clients replied."""
        return self.placement == "distributed" and not self.reveals_cohort and num_replies > self.total_shares

    def begin(self, state: Any, number: int, length: int, rng: Generator) -> tuple[Any, Any]:
        """Return no noise and no state: the noise of every round is independent."""
        return None, None

    def add(self, total: np.ndarray, begun: Any, *, step: float, num_replies: int, cohort_size: int, rng: Generator) -> None:
        """Add every noise share that the sum lacks, on the lattice, in place.

        Raises:
            RoundDiscarded: if too few or too many clients replied for the noise that was charged.
        """
        if self.below_min_replies(num_replies, cohort_size):
            raise RoundDiscarded(f"{num_replies} of {cohort_size} clients answered, too few for the noise that was charged")
        if self.above_max_replies(num_replies):
            raise RoundDiscarded(
                f"{num_replies} clients answered, and the noise has {self.total_shares} shares: it would reveal how many"
            )
        total += noise.gaussian(total, self.server_std(num_replies), step, rng)

    # The run

    def stop_reason(self, number: int) -> str | None:
        """Return why the noise does not cover round `number`; None if it does: independent noise covers all."""
        return None

    def check_rounds(self, num_rounds: int) -> None:
        """Refuse a number of rounds that the noise is not made for; independent noise is made for any."""

    @property
    def numbers(self) -> dict[str, float]:
        """Further numbers of the noise, for the statement."""
        return {}

    @property
    def num_rounds_of_event(self) -> int:
        """The number of rounds that one event covers; 0 if each round has its own."""
        return 0

    @property
    def max_participations(self) -> int | None:
        """The largest number of participations that the noise is made for; None for any."""
        return None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Further assumptions of the noise, for the statement."""
        return ()

    # The protection

    @property
    def promised_multiplier(self) -> float:
        """The noise multiplier of the whole release, which clients are promised."""
        return self.release.mechanism.noise_multiplier

    def events(self, number: int, cohort_size: int) -> dict[str, dp_events.DpEvent]:
        """Return the event of a round against any single client, and against outsiders."""
        inside = self.without_own_share(self.shares(cohort_size))
        return {"": inside.event(number), "outsiders": self.release_to_outsiders.event(number)}

    @property
    def reveals_cohort(self) -> bool:
        """Whether the release reveals the cohort, which voids amplification by sampling.

        It does if each client compresses its own noised update, or if the noise depends on how many clients replied.
        """
        return self.compresses_noised_updates or (self.placement == "distributed" and not self.server_completes_noise)

    @property
    def cohort_is_secret(self) -> bool:
        """Whether the epsilon holds only if nobody knows who takes part in a round; assumed for a user's own sampler."""
        sampler, num_clients = self.release.sampler, self.release.num_units
        everybody = type(sampler) is FixedSizeSampling and sampler.max_cohort_size(num_clients) == num_clients
        return not (self.reveals_cohort or everybody or type(sampler) in (FullSampling, *_PUBLIC))

    @property
    def num_shares_varies(self) -> bool:
        """Whether the number of shares, and so the charge, depends on the cohort that is drawn."""
        return self.placement == "distributed" and not self.server_completes_noise and self.release.sampler.cohort_size_is_secret

    @property
    def release_to_outsiders(self) -> Release:
        """The release as outsiders see it: with all its noise."""
        release = self.release
        if self.reveals_cohort and not isinstance(release.sampler, _PUBLIC):
            # An unselected client can be distinguished from one whose update is zero: no amplification by sampling.
            release = replace(release, sampler=FullSampling())
        if self.compresses_noised_updates:
            # The sum of such messages is no function of the noised sum: only the client's own noise share protects it.
            release = replace(release, mechanism=Gaussian(noise_multiplier=self.share_std(0) / release.clip_norm))
        return release

    @property
    def release_to_participants(self) -> Release:
        """The most that the ledger charges for a round: the release as any single client sees it, as far as can be proved."""
        # Two shares are the worst case: if there is only one share, the client who knows it is the only one in the sum.
        return self.without_own_share(2 if self.num_shares_varies else self.shares(self.total_shares))

    def without_own_share(self, shares: int) -> Release:
        """Return the release against one of its own clients, which knows its own noise share and subtracts it.

        Args:
            shares: number of shares that make up the noise of the release.
        """
        release = self.release_to_outsiders
        if self.placement == "central" or self.compresses_noised_updates or shares <= 1:
            return release
        left = release.mechanism.noise_multiplier * math.sqrt((shares - 1) / shares)
        return replace(release, mechanism=Gaussian(noise_multiplier=left))


def converted(value: Any, kind: type[T], /, **changes: Any) -> T:
    """Return an object of another dataclass with the fields that both have, and some other ones."""
    both = {part.name for part in fields(value)} & {part.name for part in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: getattr(value, name) for name in both} | changes)
