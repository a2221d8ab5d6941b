"""Minimum separation: who may take part in a round, by who took part before; it needs no random sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flower_dp.core import checks, dp_events
from flower_dp.core.sampling import _OfOneSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """The participations of one client so far.

    Attributes:
        last: number of the last round.
        count: number of participations.
    """

    last: int
    count: int


def default_separation(num_clients: int, cohort_size: int) -> int:
    """Return four fifths of the largest separation with full cohorts: the rest is for clients that are not connected."""
    return max(1, math.floor(0.8 * num_clients / cohort_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumSeparationSampling(_OfOneSize):
    """Up to `cohort_size` of the connected clients, each again only after `min_separation` rounds; no amplification.

    A client that took part in round t may take part again from round t + `min_separation`, and at most `max_participations` times
    in all. Those with the fewest participations come first, in random order among themselves. A participation counts when the
    client is asked, whether or not it replies. Source: Xu et al. 2023, "Federated Learning of Gboard Language Models with
    Differential Privacy", section 3.

    Attributes:
        cohort_size: number of clients of a round, if so many may take part.
        min_separation: least difference of the numbers of two rounds of one client (paper: b); 1 for every round.
        max_participations: largest number of participations of a client (paper: k); None for as many as the rounds allow.

    Example:
        >>> import numpy as np
        >>> from flower_dp.core.participation import MinimumSeparationSampling, Participation
        >>> sampling = MinimumSeparationSampling(cohort_size=1, min_separation=2)
        >>> sampling.choose(("a", "b"), {"a": Participation(last=1, count=1)}, 2, np.random.default_rng()).tolist()
        [1]
        >>> sampling.participations(num_rounds=5)
        3
    """

    min_separation: int
    max_participations: int | None = None

    def __post_init__(self) -> None:
        _OfOneSize.__post_init__(self)
        checks.integer("min_separation", self.min_separation, at_least=1)
        if self.max_participations is not None:
            checks.integer("max_participations", self.max_participations, at_least=1)

    def participations(self, num_rounds: int) -> int:
        """Return the largest number of participations of a client in `num_rounds` rounds: min(k, ceil(T / b))."""
        most = -(-num_rounds // self.min_separation)
        return most if self.max_participations is None else min(most, self.max_participations)

    def sample(self, server_round: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Refuse: a cohort depends on who took part before; `choose` draws it.

        Raises:
            ValueError: always.
        """
        problem = "draws by who took part before, which only the training of client-level methods keeps"
        raise ValueError(f"sampling={self}: {problem}; use PoissonSampling or FullSampling here")

    def choose(
        self, names: Sequence[str], past: Mapping[str, Participation], number: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the sorted indices of the clients of round `number` (from 1).

        Args:
            names: names of the connected clients.
            past: participations so far by name; a client without any may take part at once.
            number: number of the round.
            rng: generator that orders clients with equally many participations.
        """
        counts = [past[name].count if name in past else 0 for name in names]
        free = np.array([place for place, name in enumerate(names) if self.refusal(past.get(name), number) is None], int)
        order = np.lexsort((rng.random(len(free)), np.asarray(counts, int)[free]))
        return np.sort(free[order[: self.cohort_size]])

    def refusal(self, past: Participation | None, number: int) -> str | None:
        """Return why a client with these participations may not take part in round `number`; None if it may."""
        if past is None:
            return None
        if number < past.last + self.min_separation:
            return f"it took part in round {past.last}, and min_separation={self.min_separation}"
        if self.max_participations is not None and past.count >= self.max_participations:
            return f"it took part {past.count} times, and max_participations={self.max_participations}"
        return None

    def event(self, release: dp_events.DpEvent, server_round: int, num_clients: int) -> dp_events.DpEvent:
        """Return the event of independent noise: the release's own if a client may take part once more by now, else no cost."""
        grows = self.participations(server_round) > self.participations(server_round - 1)
        return release if grows else dp_events.NoOpDpEvent()
