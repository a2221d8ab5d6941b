"""The state of a run as one value, the report of a round, and facts for the statement."""

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
    server. They reveal how many clients took part, and the epsilon holds only if nobody knows that. `public` leaves them out.

    Attributes:
        server_round: number of the round, from 1.
        cohort_size: number of clients that were sent a request.
        replies: number of clients whose updates count.
        bytes_down: bytes of arrays and text sent to nodes.
        bytes_up: bytes of arrays and text in the replies that count.
        bytes_per_client: bytes of arrays that one client sends, as far as public numbers determine them.
        seconds: time from the requests to the new model, in seconds.
        epsilon: a quick upper bound of the cost of all rounds so far; the statement has the accountant's own value.
        cohort_is_secret: whether the epsilon holds only if nobody knows who takes part.
        numbers: further public numbers of the method, by name, such as the largest resource cost of a device so far.
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
    """The facts of a run for its statement, besides its ledgers.

    Attributes:
        seeded_noise: whether noise or sampling came from a fixed seed; the run is not private then.
        missing: number of requested updates that did not count.
        incidents: incidents of the run, as text.
        report_client_metrics: whether clients were asked for metrics, which are not private.
        custom_evaluation: whether a subclass requests evaluations, whose metrics are not private.
        changing_names: whether charges are counted by client names that change when nodes restart.
        num_known: maximum number of clients among which a cohort was drawn; 0 before the first.
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
    """The state from which a run resumes, as one value. Two states are equal if all their fields are.

    `flower_dp.core.serialization.dump_bytes` stores it. It holds no client's data: only models, counts and numbers that the
    server has anyway. `rounds` must stay on the server: see `RoundReport`.

    Attributes:
        rounds: reports of all rounds.
        incidents: incidents of the run, as text.
        missing: number of requested updates that did not count.
        charged: number of charges by release name. A state with other numbers than the log does not belong to this run.
        charges: the run's charges, of which the log has the record; empty in a checkpoint, which has a ledger.
        planned_rounds: number of rounds of the run; None if not set.
        names: names of the clients at the run's start, for methods with terms for each client; empty before the start.
        evaluations: value and standard error of every metric of private evaluations, by round.
        unanswered_evaluations: cohort sizes of the private evaluations since the last with a reply.
        client_metrics: means of the training metrics that clients were asked for, by round; they are not private.
        refusal: the last reason for which a client's update did not count.
        ended_before: the round that the budget did not cover; neither it nor a later one is run. None while it covers them.
        model: the arrays that are trained, as one vector [d], float32, after the last round; None before the first.
        releases: states of the releases that have one, by name.
        own: the method's own state; None if it has none.
        optimizer: state of the server's optimizer; None without one.
        not_private: whether a round had noise or sampling from a fixed seed; once true, it stays true.
        asked_metrics: whether clients were asked for training metrics, which are not private.
        custom_evaluation: whether a round was run by a subclass that requests evaluations, whose metrics are not private.
        changing_names: whether a round was charged by client names that change when nodes restart.
        num_known: maximum number of clients among which a cohort was drawn.
        run: id of the run that was charged; empty before its first charge, or if it is not known.
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
        """Return the state with one more charge counted, as the log has it."""
        return replace(self, charged={**self.charged, charge.release: charge.number})

    def reported_epsilon(self, epsilon: float) -> float:
        """Return an epsilon as it is reported: infinite if noise or sampling came from a fixed seed."""
        return math.inf if self.not_private else epsilon

    @property
    def secret(self) -> dict[str, Any]:
        """The states of noise that is correlated over rounds, by release. Later rounds use the drawn noise, so it is secret."""
        states = {name: getattr(state, "noise", None) for name, state in self.releases.items()}
        return {name: noise for name, noise in states.items() if noise is not None}

    @property
    def unanswered(self) -> tuple[RoundReport, ...]:
        """The rounds since the last usable update of a client, without those with an empty cohort."""
        since = itertools.takewhile(lambda report: not report.replies, reversed(self.rounds))
        return tuple(report for report in since if report.cohort_size)

    def line_of(self, server_round: int) -> dict[str, int | float]:
        """Return a round's numbers for display.

        They are the public numbers of its report and the metrics of its private evaluation, as `private-...`. If clients were
        asked for training metrics, which are not private, their means are there as `client-...`.
        """
        line = {f"private-{name}": value for name, value in self.evaluations.get(server_round, {}).items()}
        line |= self.client_metrics.get(server_round, {})
        return line | (self.rounds[-1].public() if server_round else {"epsilon": 0.0})
