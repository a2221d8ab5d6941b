"""The noise of one sum of client updates: who draws which part of it, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from flower_dp.core import dp_events, noise
from flower_dp.core.noise import Generator, gaussian_share
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, RoundRobinSampling
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.left_out import RoundDiscarded


class Noise(Protocol):
    """Who draws which part of a sum's noise, and what it costs.

    Attributes:
        release: the noised sum.
        placement: `central` or `distributed`.
        compresses_noised_updates: whether what a client sends is no part of the noised sum.
        cohort_is_secret: whether the epsilon counts on nobody knowing who takes part in a round.
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

    def share_std(self, cohort_size: int) -> float:
        """Return the std of the noise that each of a cohort's clients adds to its own update."""

    def events(self, number: int, cohort_size: int) -> Mapping[str, dp_events.DpEvent]:
        """Return what a round costs, as any single client ("") and as "outsiders" see it; number 1, 2, ... of its charges.

        Noise that is correlated over rounds may have one event of the run at number 1, and `NoOpDpEvent` later.
        """

    def begin(self, state: Any, number: int, length: int, rng: Generator) -> tuple[Any, Any]:
        """Return what is drawn before the replies, for this round alone, and the next state of the noise.

        The state is None for noise that is independent from round to round. Any other is secret, and on the disk before a message
        of the round leaves, so that no crash has noise drawn twice.

        Args:
            state: of the noise; None before the first round.
            number: 1, 2, ... of the release's charges.
            length: of the noised vector.
            rng: fresh, for this round.
        """

    def add(self, total: np.ndarray, begun: Any, *, step: float, num_replies: int, cohort_size: int, rng: Generator) -> None:
        """Add the server's part of the noise to the sum of the replies, in place.

        Raises:
            RoundDiscarded: if too few or too many clients answered for the noise that was charged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSharing:
    """Who draws which part of a release's Gaussian noise, and what that protects against whom.

    Under `central` placement the server draws all of it. Under `distributed` placement every client adds a share to its own
    update; the shares of the clients that answer add up to the noise of the release.

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
        """How many shares make up the noise of the sum: as many as there can ever be clients in a round.

        A public number: shares by the number of clients that were drawn would tell each of them how many there are.
        """
        return self.release.sampler.max_cohort_size(self.release.num_units)

    def min_replies(self, cohort_size: int) -> int:
        """Return how many of the drawn clients must answer where nobody adds the shares of the others.

        Where every cohort is as large as any other, that number decides: those who are not connected are no fewer shares, which
        would cost more than was planned.
        """
        drawn = min(cohort_size, self.total_shares) if self.release.sampler.cohort_size_is_secret else self.total_shares
        return max(1, math.ceil(self.min_reply_ratio * drawn - 1e-9))

    def shares(self, cohort_size: int) -> int:
        """Return how many shares make up the noise of a round."""
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
        """Std of the least noise that a client is ever asked to add itself: 0 where the server adds it."""
        return self.share_std(self.total_shares)

    def server_std(self, num_replies: int) -> float:
        """Return the std of the noise that the server adds to the sum of `num_replies` updates."""
        if self.placement == "central":
            return self.release.noise_scale
        if self.reveals_cohort:
            return 0.0
        shares = self.total_shares
        # `above_max_replies` refuses more replies than shares: with them the noise would grow with the cohort, and tell its size.
        return self.release.noise_scale * math.sqrt((shares - num_replies) / shares)

    def below_min_replies(self, num_replies: int, cohort_size: int) -> bool:
        """Return whether these replies have less noise than the release that was charged."""
        return self.placement == "distributed" and not self.server_completes_noise and num_replies < self.min_replies(cohort_size)

    def above_max_replies(self, num_replies: int) -> bool:
        """Return whether these replies have more noise than the release: its variance would tell how many clients replied."""
        return self.placement == "distributed" and not self.reveals_cohort and num_replies > self.total_shares

    def begin(self, state: Any, number: int, length: int, rng: Generator) -> tuple[Any, Any]:
        """Return nothing: the noise of every round is drawn afresh."""
        return None, None

    def add(self, total: np.ndarray, begun: Any, *, step: float, num_replies: int, cohort_size: int, rng: Generator) -> None:
        """Add the noise that the shares in the sum lack, on the lattice, in place.

        Raises:
            RoundDiscarded: if too few or too many clients answered for the noise that was charged.
        """
        if self.below_min_replies(num_replies, cohort_size):
            raise RoundDiscarded(f"{num_replies} of {cohort_size} clients answered, too few for the noise that was charged")
        if self.above_max_replies(num_replies):
            raise RoundDiscarded(
                f"{num_replies} clients answered, and the noise has {self.total_shares} shares: it would tell how many"
            )
        total += noise.gaussian(total, self.server_std(num_replies), step, rng)

    # What it protects

    def events(self, number: int, cohort_size: int) -> dict[str, dp_events.DpEvent]:
        """Return what a round costs, as any single client and as those who are no clients see it."""
        inside = self.without_own_share(self.shares(cohort_size))
        return {"": inside.event(number), "outsiders": self.release_to_outsiders.event(number)}

    @property
    def reveals_cohort(self) -> bool:
        """Whether the release reveals the cohort, which voids amplification by sampling.

        It does by what each client makes of its own noised update, or by a noise that depends on how many clients answered.
        """
        return self.compresses_noised_updates or (self.placement == "distributed" and not self.server_completes_noise)

    @property
    def cohort_is_secret(self) -> bool:
        """Whether the epsilon counts on nobody knowing who takes part in a round; with a sampler of a user's own it may."""
        sampler, num_clients = self.release.sampler, self.release.num_units
        everybody = type(sampler) is FixedSizeSampling and sampler.max_cohort_size(num_clients) == num_clients
        return not (self.reveals_cohort or everybody or type(sampler) in (FullSampling, RoundRobinSampling))

    @property
    def num_shares_varies(self) -> bool:
        """Whether the number of shares, and so the charge, depends on the cohort that is drawn."""
        return self.placement == "distributed" and not self.server_completes_noise and self.release.sampler.cohort_size_is_secret

    @property
    def release_to_outsiders(self) -> Release:
        """The release as those who are no clients see it: with all its noise."""
        release = self.release
        if self.reveals_cohort and not isinstance(release.sampler, RoundRobinSampling):
            # A client that is not drawn can be told from one whose update is zero: no amplification by sampling.
            release = replace(release, sampler=FullSampling())
        if self.compresses_noised_updates:
            # A sum of such messages is no function of the noised sum: only the client's own share of noise protects it.
            release = replace(release, mechanism=Gaussian(noise_multiplier=self.share_std(0) / release.clip_norm))
        return release

    @property
    def release_to_participants(self) -> Release:
        """The release that the ledger charges, at most: what can be proved of what any single client sees."""
        # Two shares are the worst case: of one alone, the client who knows it is the only one in the sum.
        return self.without_own_share(2 if self.num_shares_varies else self.shares(self.total_shares))

    def without_own_share(self, shares: int) -> Release:
        """Return the release as one of its own clients sees it, who knows its own share of the noise and subtracts it.

        Args:
            shares: how many shares make up the noise of the release.
        """
        release = self.release_to_outsiders
        if self.placement == "central" or self.compresses_noised_updates or shares <= 1:
            return release
        left = release.mechanism.noise_multiplier * math.sqrt((shares - 1) / shares)
        return replace(release, mechanism=Gaussian(noise_multiplier=left))
