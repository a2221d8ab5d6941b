"""Local placement: what the rules of all methods have in common in which every message is private on its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Self

import numpy as np

from flower_dp.core import dp
from flower_dp.core.sampling import Sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.charges import Charges, History
from flower_dp.privacy.events import Relation
from flower_dp.strategies.local_evaluation import NOISE_DEVIATIONS, OwnEvaluation
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.books import ClientBooks
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.releases.release import Round
from flower_dp.strategies.rules import About
from flower_dp.strategies.run_state import RunState


class LocalRules:
    """Terms and a budget of every client, and a stop where all budgets are spent.

    A subclass says in `weight`, `longest` and `vectors` what its rows are, and in `learn` and `statement` what comes of them.

    Attributes:
        training: the replies of training.
        evaluation: private evaluations; None without them.

    Args:
        title: the method's name for people.
        books: terms of every client, and their costs.
        name: of the method on the wire.
        sampling: who takes part in a round.
        clip_norm: of the releases.
        evaluation: the plan of private evaluations.

    Raises:
        ValueError: if the plan is for methods with one ledger for all clients.
    """

    stock_refusal = "stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"

    def __init__(
        self,
        title: str,
        books: ClientBooks,
        *,
        name: str,
        sampling: Sampler,
        clip_norm: float,
        evaluation: PrivateEvaluation | LocalEvaluation | None,
    ) -> None:
        num_clients = books.population.num_clients
        sampling.expected_cohort(num_clients)
        self.about = About(title=title, num_clients=num_clients, delta=books.delta, stock_refusal=self.stock_refusal)
        self.books, self._name, self.sampling, self.clip_norm = books, name, sampling, clip_norm
        self.cohort_size = sampling.largest_cohort(num_clients)
        self._plan = None if evaluation is None else OwnEvaluation.checked(evaluation, title)
        self._open()

    def opened(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        """Return the rules of a run of these clients, each with its own terms.

        Raises:
            ValueError: if names or their number don't fit, or a run goes on with a client that it did not begin with.
            RuntimeError: if the number of replies is not known.
        """
        if known := self.books.terms:
            if new := sorted(set(names) - set(known)):
                raise ValueError(
                    f"clients: {new[0]!r} was not there when this run began; this method has terms for those of its start"
                )
            names = tuple(known)
        rules = copy.copy(self)
        rules.books = self.books.opened(names, num_rounds)
        rules._open()
        return rules

    def _open(self) -> None:
        """Make the releases, which ask this object for what a row is."""
        self.training = OwnReplies(
            name=self._name,
            clip_norm=self.clip_norm,
            sampling=self.sampling,
            relation=self.books.relation,
            weight_of=self.weight,
            longest=self.longest,
            vectors_of=self.vectors,
            terms=self.books.terms,
        )
        self.evaluation = None if self._plan is None else OwnEvaluation.of(self._plan, self.books)

    @property
    def releases(self) -> tuple[OwnReplies, ...]:
        """The release of training, and that of private evaluations if there are any."""
        return (self.training,) if self.evaluation is None else (self.training, self.evaluation)

    # What a row is

    def weight(self, name: str) -> float:
        """Return what a client's row counts in the sum: its share."""
        return self.books.share(name)

    def longest(self, now: Round) -> Callable[[str], float]:
        """Return how long a client's mean of clipped contributions, with its noise, is at most."""

        def longest(name: str) -> float:
            own = self.books.terms[name].release
            # Laplace vectors are up to twice as long as Gaussian ones, and spread more.
            noise = own.noise_scale * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)
            whole = own.unit == "client"
            contributions = 1.0 if whole else self.books.num_records[name]
            return (contributions * own.clip_norm + noise) / (1.0 if whole else own.expected_cohort)

        return longest

    def vectors(self, own: Any, size: int) -> Mapping[str, np.ndarray]:
        """Return the vectors that are sent with the model: none."""
        return {}

    # Charges

    def why_stop(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        """Return that every budget is spent, if so."""
        return None if self.training.anyone_pays(state.charges) else "every client's budget is spent"

    def numbers(self, state: RunState, now: Round | None) -> Mapping[str, float]:
        """Return an upper bound of the largest cost of a client, quick to compute."""
        pure: dict[str, float] = {}
        if (evaluation := self.evaluation) is not None:
            terms, counts = evaluation.terms, evaluation.counts(state.charges)
            pure = {name: count * _pure(terms[name].event, evaluation.relation) for name, count in counts.items() if count}
        return {"epsilon": self.books.worst(self.training.counts(state.charges), pure)}

    def ledgers(self, charges: Charges) -> dict[str, History]:
        """Return what every client was charged for training."""
        return self.training.ledgers(charges)

    def evaluated(self, charges: Charges, name: str) -> History:
        """Return what a client was charged for private evaluations."""
        if self.evaluation is None:
            return History(relation=self.books.relation, counts={})
        return self.evaluation.ledger(charges, name)

    def total(self, charges: Charges, name: str, ledger: History) -> Cost:
        """Return the cost of some of a client's charges and of its private evaluations together."""
        return self.books.total(ledger, self.evaluated(charges, name))


@lru_cache(maxsize=1024)
def _pure(event: dp.DpEvent, relation: Relation) -> float:
    # As a float the product may be below the sum by its last bits.
    return accounting.epsilon(event, delta=0.0, relation=relation).epsilon * (1 + 2**-40)
