"""Local DP: the common rules of all methods in which every client adds its full noise."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np

from flower_dp import wire
from flower_dp.core import checks, dp_events
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.charges import Charges, History
from flower_dp.privacy.events import Relation
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import Adversary, ClientEpsilons, PaperEpsilon, PrivacyStatement, delta_warning
from flower_dp.strategies.evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.not_covered import not_covered, seeded
from flower_dp.strategies.releases.client_ledgers import ClientLedgers
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.local_releases import LocalReleases
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import MethodFacts
from flower_dp.strategies.run_state import RunFacts, RunState

# The norm of a noise vector exceeds its bound with probability e^-60, which is 1e-26.
NOISE_DEVIATIONS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMetricsEvaluation(LocalReleases):
    """Evaluations by noised metrics of single clients, each charged to every client of its cohort.

    Attributes:
        plan: settings of the evaluations.
        books: the method's terms and ledgers.
    """

    plan: LocalEvaluation
    books: ClientLedgers

    @staticmethod
    def checked(plan: PrivateEvaluation | LocalEvaluation, title: str) -> LocalEvaluation:
        """Return the plan.

        Raises:
            ValueError: if it is for methods with one ledger for all clients, and not for the method of this title.
        """
        if not isinstance(plan, LocalEvaluation):
            raise checks.BadValue(
                "evaluation",
                f"evaluation: is a {type(plan).__name__}; {title} takes a LocalEvaluation, with a budget of every client",
            )
        return plan

    @classmethod
    def of(cls, plan: LocalEvaluation, books: ClientLedgers) -> LocalMetricsEvaluation:
        """Return the evaluations of a method with these terms."""
        terms = {name: plan.budget.terms(name, training) for name, training in books.terms.items()}

        def scale(name: str) -> float:
            """Return the Laplace scale on the mean of a client's contributions."""
            return terms[name].release.noise_scale / terms[name].release.expected_cohort_size

        def longest(now: RoundRequest) -> Callable[[str], float]:
            return lambda name: 1 + scale(name) * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)

        return cls(
            name=wire.EVALUATION,
            clip_norm=1.0,
            sampling=plan.sampling,
            relation=books.relation,
            weight_of=books.share,
            longest=longest,
            metrics=MetricBounds(bounds=plan.metrics),
            terms=terms,
            plan=plan,
            books=books,
        )

    @property
    def length(self) -> int:
        """The length of a client's row."""
        return len(self.plan.metrics)

    def due(self, charges: Charges, server_round: int) -> bool:
        """Return whether this round has an evaluation, and any client has budget left for it."""
        return self.plan.due(server_round) and self.anyone_pays(charges)

    def result(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> dict[str, float]:
        """Return value and standard error of every metric: the mean of the received rows, by their public weights.

        The standard error covers the noise and, if not all clients have replied, the choice of clients. It is an upper bound:
        the variance of the clients' values is the largest that their bounds and the reported mean allow.

        Raises:
            RoundDiscarded: if no client has replied.
        """
        if not collected.clients:
            raise RoundDiscarded("no client has answered")
        shares = {name: self.books.share(name) for name in collected.clients}
        whole = sum(shares.values())
        parts = {name: share / whole for name, share in shares.items()}
        fractions = MetricBounds(bounds=self.plan.metrics).fractions(collected.total / whole)
        scales = {name: self.terms[name].release.noise_scale / self.terms[name].release.expected_cohort_size for name in parts}
        # Laplace noise has sqrt(2) x its scale; a contribution of 1 is 2 / dimension of a metric.
        variance = sum((part * math.sqrt(2) * scales[name] * self.length / 2) ** 2 for name, part in parts.items())
        chosen = sum(part**2 for part in parts.values()) if len(parts) < len(self.terms) else 0.0
        noised: dict[str, float] = {}
        for (name, bound), fraction in zip(self.plan.metrics.items(), fractions.tolist(), strict=True):
            value = min(max(fraction, 0.0), 1.0)
            error = math.sqrt(variance + chosen * value * (1 - value))
            noised |= {name: value * bound, f"{name}-standard-error": error * bound}
        return noised


class LocalRules:
    """The rules of methods with terms and a budget for every client; a run ends when all budgets are spent.

    A subclass defines its rows in `weight`, `longest` and `vectors`, and their use in `next_model` and `statement`.

    Attributes:
        training: the release of training.
        evaluation: the release of private evaluations; None without them.

    Args:
        title: the method's name for people.
        books: terms and costs of every client.
        name: the method's name on the wire.
        sampling: sampler of a round's cohort.
        clip_norm: clip norm of the releases.
        evaluation: settings of private evaluations; None for none.

    Raises:
        ValueError: if the plan is for methods with one ledger for all clients.
    """

    stock_refusal = "stock clients add no noise of their own; use flower_dp.clients.LocalDPClient"

    def __init__(
        self,
        title: str,
        books: ClientLedgers,
        *,
        name: str,
        sampling: Sampler,
        clip_norm: float,
        evaluation: PrivateEvaluation | LocalEvaluation | None,
    ) -> None:
        num_clients = books.population.num_clients
        sampling.expected_cohort_size(num_clients)
        self.about = MethodFacts(title=title, num_clients=num_clients, delta=books.delta, stock_refusal=self.stock_refusal)
        self.books, self._name, self.sampling, self.clip_norm = books, name, sampling, clip_norm
        self.cohort_size = sampling.max_cohort_size(num_clients)
        self._plan = None if evaluation is None else LocalMetricsEvaluation.checked(evaluation, title)
        self._open()

    def with_clients(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        """Return the rules of a run of these clients, each with its own terms.

        Raises:
            ValueError: if names or their number don't fit, or a resumed run has a client that joined after its start.
            RuntimeError: if the number of replies is not known.
        """
        if known := self.books.terms:
            if new := sorted(set(names) - set(known)):
                raise ValueError(
                    f"clients: {new[0]!r} joined after the run began; this method fixes every client's terms at the start and "
                    "can't add clients"
                )
            names = tuple(known)
        rules = copy.copy(self)
        rules.books = self.books.with_clients(names, num_rounds)
        rules._open()
        return rules

    def _open(self) -> None:
        """Make the releases, which call this object for weights, bounds and vectors."""
        self.training = LocalReleases(
            name=self._name,
            clip_norm=self.clip_norm,
            sampling=self.sampling,
            relation=self.books.relation,
            weight_of=self.weight,
            longest=self.longest,
            vectors_of=self.vectors,
            terms=self.books.terms,
        )
        self.evaluation = None if self._plan is None else LocalMetricsEvaluation.of(self._plan, self.books)

    @property
    def releases(self) -> tuple[LocalReleases, ...]:
        """The release of training, and that of private evaluations if there are any."""
        return (self.training,) if self.evaluation is None else (self.training, self.evaluation)

    # The rows

    def weight(self, name: str) -> float:
        """Return the weight of a client's row in the sum: its public share."""
        return self.books.share(name)

    def longest(self, now: RoundRequest) -> Callable[[str], float]:
        """Return a bound on the norm of a client's mean of clipped contributions, with its noise."""

        def longest(name: str) -> float:
            release = self.books.terms[name].release
            # Laplace vectors are up to twice as long as Gaussian ones, and spread more.
            noise = release.noise_scale * (2 * math.sqrt(now.length) + NOISE_DEVIATIONS)
            whole = release.unit == "client"
            contributions = 1.0 if whole else self.books.num_records[name]
            return (contributions * release.clip_norm + noise) / (1.0 if whole else release.expected_cohort_size)

        return longest

    def vectors(self, own: Any, size: int) -> Mapping[str, np.ndarray]:
        """Return the vectors that are sent with the model: none."""
        return {}

    # Charges

    def stop_reason(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        """Return that every budget is spent, or None."""
        return None if self.training.anyone_pays(state.charges) else "every client's budget is spent"

    def public_metrics(self, state: RunState, now: RoundRequest | None) -> Mapping[str, float]:
        """Return an upper bound of the largest cost of a client, quick to compute."""
        pure: dict[str, float] = {}
        if (evaluation := self.evaluation) is not None:
            terms, counts = evaluation.terms, evaluation.counts(state.charges)
            pure = {name: count * _pure(terms[name].event, evaluation.relation) for name, count in counts.items() if count}
        return {"epsilon": self.books.worst(self.training.counts(state.charges), pure)}

    def ledgers(self, charges: Charges) -> dict[str, History]:
        """Return the training charges of every client, by name."""
        return self.training.ledgers(charges)

    def evaluated(self, charges: Charges, name: str) -> History:
        """Return a client's charges for private evaluations."""
        if self.evaluation is None:
            return History(relation=self.books.relation, counts={})
        return self.evaluation.ledger(charges, name)

    def total(self, charges: Charges, name: str, ledger: History) -> PrivacyCost:
        """Return the joint cost of some of a client's charges and of its private evaluations."""
        return self.books.total(ledger, self.evaluated(charges, name))


@lru_cache(maxsize=1024)
def _pure(event: dp_events.DpEvent, relation: Relation) -> float:
    # Rounded up: as a float the product with a count may be below the sum by its last bits.
    return accounting.epsilon(event, delta=0.0, relation=relation).epsilon * (1 + 2**-40)


_LISTED = 100
_ASSUMED = (
    "Every client clips and adds its noise itself, by its own budget. A client that does not loses its own privacy and nobody "
    "else's. It can't be distinguished from an honest one.",
    "Data sizes, budgets, cohorts and the names of replying clients are public. Whether a client replies does not depend on its "
    "data.",
)


def local_statement(
    rules: LocalRules,
    state: RunState,
    run: RunFacts,
    *,
    noise: Mapping[str, float],
    sampling: str,
    paper: PaperEpsilon | None,
    message_std: float = 0.0,
    assumptions: tuple[str, ...] = (),
    incidents: tuple[str, ...] = (),
    adversaries: tuple[Adversary, ...] = (),
) -> PrivacyStatement:
    """Return the statement on the clients' charges: the worst client's epsilon, and the distribution over clients.

    Args:
        rules: the method's rules; before the first round they know no clients.
        state: state of the run.
        run: facts of the run.
        noise: the method's numbers.
        sampling: description of the cohorts.
        paper: the paper's epsilon of the worst client.
        message_std: lowest std of the noise on a number in a client's message, over clients and rounds, with the client's
            public weight.
        assumptions: further assumptions of this method.
        incidents: further incidents.
        adversaries: the adversaries, if their views differ; the statement's epsilon is the largest. Empty: all see no more than
            the messages.
    """
    books, charges, evaluations = rules.books, state.charges, rules.evaluation
    costs, num_rounds = _costs(rules, charges), charges.number(rules.training.name)
    worst = max(costs, key=lambda name: costs[name].epsilon, default=None)
    largest = max([cost.epsilon for cost in costs.values()] + [entry.epsilon for entry in adversaries], default=0.0)
    releases = [terms.release for terms in books.terms.values()]
    noiseless = any(not release.mechanism.noise_multiplier for release in releases)
    private = math.isfinite(largest) and not run.seeded_noise and not noiseless and (worst is not None or not num_rounds)
    events = [] if worst is None else rules.training.ledger(charges, worst).lines()
    alone, parts, evaluated = {}, {}, None
    if evaluations is not None:
        num_evaluations = charges.number(evaluations.name)
        evaluated = f"{num_evaluations} private evaluations"
        alone = {name: ledger.cost(0.0).epsilon for name, ledger in evaluations.ledgers(charges).items()}
        if worst is not None:
            multipliers = [terms.release.mechanism.noise_multiplier for terms in evaluations.terms.values()]
            noise = {**noise, "min_evaluation_noise_multiplier": min(multipliers)}
            events += [f"evaluation: {line}" for line in evaluations.ledger(charges, worst).lines()]
            parts = {"training": books.cost(rules.training.ledger(charges, worst)).epsilon, "evaluation": alone[worst]}
        if num_evaluations:
            paper = _of_training_alone(paper)
            adversaries = tuple(
                replace(adversary, paper_epsilon=_of_training_alone(adversary.paper_epsilon)) for adversary in adversaries
            )
    if worst is not None and not adversaries:
        adversaries = _everyone(costs[worst], message_std)
    return PrivacyStatement(
        method=rules.about.title,
        unit=releases[0].unit if releases else "record",
        relation=books.relation,
        protected_against=releases[0].visible_to if releases and private else "nobody",
        delta=books.delta,
        epsilon=largest if private else math.inf,
        accountant=costs[worst].accountant if worst is not None and private else "none",
        paper_epsilon=paper,
        num_charged_rounds=num_rounds,
        noise=dict(noise),
        sampling=sampling,
        events=tuple(events),
        assumptions=(*_ASSUMED, *_delta_warning(books), *seeded(run), *assumptions),
        not_covered=not_covered(run, accounts=True, logs="logs on devices", evaluations=evaluated),
        unlisted_incidents="" if evaluations is None else "missing or rejected replies to evaluations.",
        incidents=(*_incidents(state.releases.get(rules.training.name, 0), run), *incidents),
        adversaries=adversaries if private else (),
        epsilon_by_release=parts if private else {},
        clients=_client_costs({name: cost.epsilon for name, cost in costs.items()}, alone) if costs and private else None,
    )


def _delta_warning(books: ClientLedgers) -> tuple[str, ...]:
    """Return a warning if delta promises nothing among a client's records, or among the clients if they are the units."""
    releases = [terms.release for terms in books.terms.values()]
    if not releases:
        return ()
    unit = releases[0].unit
    num_units = len(releases) if unit == "client" else max(release.num_units for release in releases)
    return delta_warning(books.delta, num_units, unit)


def relies_on_secret_sampling(rules: LocalRules, charges: Charges) -> bool:
    """Return whether a client's epsilon may be lower because nobody else knows which of its records it draws."""
    releases = {name: terms.release for name, terms in rules.books.terms.items()}
    sampled = {
        name for name, drawn in releases.items() if drawn.unit == "record" and drawn.expected_cohort_size < drawn.num_units
    }
    return any(name in sampled and accounting.relies_on_secret_sampling(cost) for name, cost in _costs(rules, charges).items())


def least_and_largest(books: ClientLedgers, what: str, number: Callable[[Release], float]) -> dict[str, float]:
    """Return the minimum and maximum over clients of the noise multiplier, and of another number of the release."""
    releases = [terms.release for terms in books.terms.values()]
    numbers = {}
    for word, pick in (("min", min), ("max", max)) if releases else ():
        numbers[f"{word}_noise_multiplier"] = pick(release.mechanism.noise_multiplier for release in releases)
        numbers[f"{word}_{what}"] = pick(map(number, releases))
    return numbers


def most_replies(books: ClientLedgers) -> str:
    """Return the text of the maximum replies of a client by its terms."""
    replies = sorted({terms.num_replies for terms in books.terms.values()}) or [0]
    return f"at most {replies[0]}{f' to {replies[-1]}' if len(replies) > 1 else ''} replies per client"


def _costs(rules: LocalRules, charges: Charges) -> dict[str, PrivacyCost]:
    return {name: rules.total(charges, name, ledger) for name, ledger in rules.ledgers(charges).items()}


def _of_training_alone(paper: PaperEpsilon | None) -> PaperEpsilon | None:
    if paper is None:
        return None
    why = "it covers training alone, and metrics of private evaluations were released as well"
    return replace(paper, valid=False, reason=f"{why}; {paper.reason}")


def _everyone(cost: PrivacyCost, message_std: float) -> tuple[Adversary, ...]:
    """Return the three adversaries of a method in which every message is private: all see no more than the messages."""
    views = {
        "the server": "every message; an eavesdropper sees the same",
        "participants": "models made from messages; their own messages tell them nothing about others",
        "outsiders": "models made from messages",
    }
    return tuple(Adversary.of(name, cost, view=sees, lowest_noise_std=message_std) for name, sees in views.items())


def _client_costs(costs: dict[str, float], evaluation: dict[str, float]) -> ClientEpsilons:
    return ClientEpsilons(
        count=len(costs),
        minimum=min(costs.values()),
        median=statistics.median(costs.values()),
        maximum=max(costs.values()),
        worst=max(costs, key=lambda name: costs[name]),
        by_client=costs if len(costs) <= _LISTED else {},
        evaluation_by_client=evaluation if len(costs) <= _LISTED else {},
    )


def _incidents(num_unasked: int, run: RunFacts) -> list[str]:
    lines = list(run.incidents)
    if run.missing.total:
        lines.append(f"{run.missing.total} requested replies did not count: {run.missing}; they are charged")
    if num_unasked:
        lines.append(f"{num_unasked} times a client was skipped because its budget was spent")
    return lines
