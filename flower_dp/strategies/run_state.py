"""The state of a run as one value, and what is told of it: a round's numbers, facts for the statement."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from flower_dp.core.serialization import serializable
from flower_dp.privacy.charges import Charge, Charges
from flower_dp.strategies.releases.replies import MissingReplies


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundReport:
    """The numbers of one round.

    If cohorts are secret (`cohort_is_secret`), `cohort_size`, `replies`, `bytes_down`, `bytes_up` and `seconds` must stay on the
    server: they reveal how many clients took part, and the epsilon holds only if nobody knows that. `public` leaves them out.

    Attributes:
        server_round: 1, 2, ...
        cohort_size: clients that were asked.
        replies: clients whose updates count.
        bytes_down: bytes of arrays and text sent to nodes.
        bytes_up: bytes of arrays and text in the replies that count.
        bytes_per_client: bytes of arrays that one client sends, as far as public numbers determine them.
        seconds: time from the requests to the new model.
        epsilon: an upper bound of the cost of all rounds so far; the statement has the tight value.
        cohort_is_secret: whether the epsilon holds only if nobody knows who takes part.
        numbers: further public numbers of the method, by their names, such as the largest resource cost of a device so far.
    """

    server_round: int
    cohort_size: int
    replies: int
    bytes_down: int
    bytes_up: int
    bytes_per_client: float
    seconds: float
    epsilon: float
    cohort_is_secret: bool
    numbers: Mapping[str, float] = field(default_factory=dict)

    def public(self) -> dict[str, int | float]:
        """Return the numbers that may be published, under names in the style of run-config keys."""
        hidden = ("cohort_size", "replies", "bytes_down", "bytes_up", "seconds") if self.cohort_is_secret else ()
        left_out = ("server_round", "cohort_is_secret", "numbers", *hidden)
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in left_out}
        return {key.replace("_", "-"): value for key, value in values.items()} | dict(self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts on a run for a statement, besides its ledgers.

    Attributes:
        seeded_noise: whether noise or sampling came from a fixed seed; the run is not private then.
        missing: the number of requested updates that did not count.
        incidents: what happened, in words.
        report_client_metrics: whether clients were asked for metrics, which are not private.
        custom_evaluation: whether a subclass asks clients to evaluate, whose metrics are not private.
        changing_names: whether charges are counted by names of clients that change when their nodes start anew.
        num_known: the largest number of clients among which a cohort was drawn; 0 before the first.
    """

    seeded_noise: bool
    missing: MissingReplies
    incidents: tuple[str, ...]
    report_client_metrics: bool
    custom_evaluation: bool = False
    changing_names: bool = False
    num_known: int = 0


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunState:
    """All that a run needs to go on. Two of them are equal if all that they hold is.

    Stored with `flower_dp.core.serialization.dump_bytes`. It holds no client's data: models, counts and numbers that the server
    has anyway. `rounds` must stay on the server: see `RoundReport`.

    Attributes:
        rounds: the numbers of every round.
        incidents: what happened, in words.
        missing: the number of requested updates that did not count.
        charged: by the name of a release, how often it was charged: a state with other numbers than the log is not this run's.
        charges: those of the run, of which the log has the record; empty in a checkpoint, which has a ledger.
        planned_rounds: of the run; None if nobody has said.
        names: of the clients of a method that has terms for each, as they were at its start; empty before that.
        evaluations: value and standard error of every metric of private evaluations, by round.
        unanswered_evaluations: how many clients were asked in each private evaluation since the last that a client answered.
        client_metrics: means of the training metrics that clients were asked for, by round; they are not private.
        refusal: the last reason for which a client's update did not count.
        ended_before: the round that the budget did not cover; neither it nor a later one is run. None while it covers them.
        model: the arrays that are trained, as one vector [d], float32, after the last round; None before the first.
        releases: the states of releases that have one, by name.
        own: what the method itself keeps; None for nothing.
        optimizer: the state of the server's optimizer; None without one.
        not_private: whether a round had noise or sampling from a fixed seed; it stays so.
        asked_metrics: whether clients were asked for training metrics, which are not private.
        custom_evaluation: whether a round was run by a subclass that asks clients to evaluate, whose metrics are not private.
        changing_names: whether a round was charged by names of clients that change when their nodes start anew.
        num_known: the largest number of clients among which a cohort was drawn.
        run: the id of the run that was charged; empty before its first charge, and where it is not told.
    """

    rounds: tuple[RoundReport, ...] = ()
    incidents: tuple[str, ...] = ()
    missing: MissingReplies = field(default_factory=MissingReplies)
    charged: Mapping[str, int] = field(default_factory=dict)
    charges: Charges = field(default_factory=Charges)
    planned_rounds: int | None = None
    names: tuple[str, ...] = ()
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    unanswered_evaluations: tuple[int, ...] = ()
    client_metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    refusal: str = "no reply"
    ended_before: int | None = None
    model: np.ndarray | None = None
    releases: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    optimizer: Mapping[str, Any] | None = None
    not_private: bool = False
    asked_metrics: bool = False
    custom_evaluation: bool = False
    changing_names: bool = False
    num_known: int = 0
    run: str = ""

    def happened(self, incident: str) -> Self:
        """Return the state with one more incident."""
        return replace(self, incidents=(*self.incidents, incident))

    def with_release(self, name: str, state: Any) -> Self:
        """Return the state with another state of one release."""
        return replace(self, releases={**self.releases, name: state})

    def charged_with(self, charge: Charge) -> Self:
        """Return the state that belongs to the log after one more charge."""
        return replace(self, charged={**self.charged, charge.release: charge.number})

    def shown(self, epsilon: float) -> float:
        """Return an epsilon as it is told: infinite if noise was not drawn afresh."""
        return math.inf if self.not_private else epsilon

    @property
    def secret(self) -> dict[str, Any]:
        """The states of noise that is correlated over rounds, by release: what was drawn is in later rounds, and secret."""
        states = {name: getattr(state, "noise", None) for name, state in self.releases.items()}
        return {name: noise for name, noise in states.items() if noise is not None}

    @property
    def unanswered(self) -> tuple[RoundReport, ...]:
        """The rounds since the last usable update of a client, without those in which nobody was asked."""
        since = itertools.takewhile(lambda report: not report.replies, reversed(self.rounds))
        return tuple(report for report in since if report.cohort_size)

    def line_of(self, server_round: int) -> dict[str, int | float]:
        """Return the numbers of a round for people to see.

        They are those of its report, the metrics of its private evaluation as `private-...`, and, where clients were asked for
        training metrics, which are not private, their means as `client-...`.
        """
        line = {f"private-{name}": value for name, value in self.evaluations.get(server_round, {}).items()}
        line |= self.client_metrics.get(server_round, {})
        return line | (self.rounds[-1].public() if server_round else {"epsilon": 0.0})
