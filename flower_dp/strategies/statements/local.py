"""The privacy statement of a method whose clients each have a ledger of their own."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flower_dp.core.sampling import Sampler
from flower_dp.privacy.accounting import Cost, counts_sampling
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.events import Relation
from flower_dp.privacy.ledger import Ledger
from flower_dp.privacy.statement import Adversary, ClientCosts, PaperEpsilon, PrivacyStatement
from flower_dp.strategies.releases.books import ClientBooks
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.not_covered import not_covered

_LISTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEvaluationFacts:
    """What the statement tells of private evaluations.

    Attributes:
        num_evaluations: how many were charged.
        training: what training alone has cost every client.
        alone: what evaluations alone have cost every client.
        lines: the ledger of evaluations of every client.
        noise_multipliers: of every client.
    """

    num_evaluations: int
    training: Mapping[str, float]
    alone: Mapping[str, float]
    lines: Mapping[str, tuple[str, ...]]
    noise_multipliers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFacts:
    """The facts from which the statement is made.

    Attributes:
        title: the method's name.
        relation: neighbouring relation.
        delta: at which epsilon is stated.
        sampling: who was asked.
        terms: of every client; empty before the first round.
        ledgers: of every client.
        costs: of every client's ledger.
        num_rounds: rounds that were charged.
        num_unasked: times that a client whose budget was spent was not asked.
        run: facts of the run.
        evaluation: the part of private evaluations; None without them.
    """

    title: str
    relation: Relation
    delta: float
    sampling: Sampler
    terms: Mapping[str, Terms]
    ledgers: Mapping[str, Ledger]
    costs: Mapping[str, Cost]
    num_rounds: int
    num_unasked: int
    run: RunFacts
    evaluation: LocalEvaluationFacts | None = None

    @property
    def counts_sampling(self) -> bool:
        """Whether a client's epsilon is the less because nobody else knows which of its records it draws."""
        return any(self._samples(name) and counts_sampling(cost) for name, cost in self.costs.items())

    def _samples(self, name: str) -> bool:
        release = self.terms[name].release
        return release.unit == "record" and release.expected_cohort < release.num_clients


def local_facts(title: str, books: ClientBooks, sampling: Sampler, run: RunFacts) -> LocalFacts:
    """Return the facts from a method's client ledgers."""
    return LocalFacts(
        title=title,
        relation=books.relation,
        delta=books.delta,
        sampling=sampling,
        terms=books.terms,
        ledgers=books.ledgers,
        costs={name: books.total(name, ledger) for name, ledger in books.ledgers.items()},
        num_rounds=books.num_rounds,
        num_unasked=books.num_unasked,
        run=run,
        evaluation=None if books.evaluation is None else _evaluated(books, books.evaluation),
    )


def _evaluated(books: ClientBooks, evaluations: OwnReplies) -> LocalEvaluationFacts:
    return LocalEvaluationFacts(
        num_evaluations=evaluations.num_charged,
        training={name: books.cost(ledger).epsilon for name, ledger in books.ledgers.items()},
        alone={name: ledger.cost(0.0).epsilon for name, ledger in evaluations.ledgers.items()},
        lines={name: tuple(ledger.lines()) for name, ledger in evaluations.ledgers.items()},
        noise_multipliers={name: terms.release.mechanism.noise_multiplier for name, terms in evaluations.terms.items()},
    )


def state(
    facts: LocalFacts,
    *,
    message_std: float = 0.0,
    noise: dict[str, float] | None = None,
    paper: PaperEpsilon | None = None,
    sampling: str = "",
    assumptions: tuple[str, ...] = (),
    incidents: tuple[str, ...] = (),
    adversaries: tuple[Adversary, ...] = (),
) -> PrivacyStatement:
    """Return the statement of what the clients' ledgers hold: the worst client's epsilon, and the distribution over clients.

    Args:
        facts: before the first round they have no clients.
        message_std: the smallest std of the noise on a number in a client's message, over clients and rounds, with the client's
            public weight.
        noise: the method's numbers.
        paper: the paper's epsilon of the worst client.
        sampling: who was asked, in words.
        assumptions: further assumptions of this method.
        incidents: further incidents.
        adversaries: the adversaries, if they see different things; the statement's epsilon is the largest.
    """
    costs = dict(facts.costs)
    worst = max(costs, key=lambda name: costs[name].epsilon, default=None)
    largest = max([cost.epsilon for cost in costs.values()] + [entry.epsilon for entry in adversaries], default=0.0)
    release = next((terms.release for terms in facts.terms.values()), None)
    noiseless = any(not terms.release.mechanism.noise_multiplier for terms in facts.terms.values())
    private = (
        math.isfinite(largest) and not facts.run.seeded_noise and not noiseless and (worst is not None or not facts.num_rounds)
    )
    if not private:
        costs = {}
    evaluation = facts.evaluation
    if evaluation is not None and evaluation.num_evaluations:
        paper = paper and _of_training_alone(paper)
        adversaries = tuple(
            replace(one, paper=_of_training_alone(one.paper)) if one.paper is not None else one for one in adversaries
        )
    return PrivacyStatement(
        method=facts.title,
        unit=release.unit if release else "record",
        relation=facts.relation,
        adversary=release.seen_by if release and private else "nobody",
        delta=facts.delta,
        epsilon=largest if private else math.inf,
        accountant=costs[worst].accountant if worst in costs else "none",
        paper=paper,
        num_rounds=facts.num_rounds,
        noise={**(noise or {}), **_evaluation_noise(evaluation)},
        sampling=sampling or str(facts.sampling),
        events=_events(facts, worst) if worst is not None else (),
        assumptions=(*_assumptions(facts), *assumptions),
        not_covered=_not_covered(facts),
        incidents=(*_incidents(facts), *incidents),
        adversaries=(adversaries or _everyone(costs, worst, message_std)) if private else (),
        parts=_parts(evaluation, worst) if evaluation is not None and worst in costs else {},
        clients=_client_costs({name: cost.epsilon for name, cost in costs.items()}, evaluation),
    )


def _of_training_alone(paper: PaperEpsilon) -> PaperEpsilon:
    why = "it is that of training alone, and metrics of private evaluations were released as well"
    return replace(paper, valid=False, reason=f"{why}; {paper.reason}")


def _events(facts: LocalFacts, worst: str) -> tuple[str, ...]:
    """Return what the ledgers of the worst client hold."""
    evaluated = facts.evaluation.lines[worst] if facts.evaluation is not None else ()
    return (*facts.ledgers[worst].lines(), *(f"evaluation: {line}" for line in evaluated))


def _evaluation_noise(evaluation: LocalEvaluationFacts | None) -> dict[str, float]:
    if evaluation is None or not evaluation.noise_multipliers:
        return {}
    return {"least_evaluation_noise_multiplier": min(evaluation.noise_multipliers.values())}


def _parts(evaluation: LocalEvaluationFacts, worst: str | None) -> dict[str, float]:
    """Return what training alone, and evaluations alone, have cost the worst client."""
    if worst is None:
        return {}
    return {"training": evaluation.training[worst], "evaluation": evaluation.alone[worst]}


def _everyone(costs: dict[str, Cost], worst: str | None, message_std: float) -> tuple[Adversary, ...]:
    """Return the three adversaries of a method in which every message is private: all see no more than the messages."""
    if worst is None:
        return ()
    return tuple(
        Adversary(
            name=name,
            sees=sees,
            epsilon=costs[worst].epsilon,
            accountant=costs[worst].accountant,
            noise_std=message_std,
        )
        for name, sees in (
            ("the server", "every message of a client"),
            ("participants", "models that are made of messages; their own messages tell them nothing of others'"),
            ("outsiders", "models that are made of messages"),
        )
    )


def _client_costs(costs: dict[str, float], evaluation: LocalEvaluationFacts | None) -> ClientCosts | None:
    if not costs:
        return None
    return ClientCosts(
        count=len(costs),
        minimum=min(costs.values()),
        median=statistics.median(costs.values()),
        maximum=max(costs.values()),
        worst=max(costs, key=lambda name: costs[name]),
        each=costs if len(costs) <= _LISTED else {},
        evaluation=dict(evaluation.alone) if evaluation is not None and len(costs) <= _LISTED else {},
    )


def _assumptions(facts: LocalFacts) -> list[str]:
    lines = [
        "a client clips and adds its noise itself, by its own budget; one that does not loses its own privacy, nobody else's, "
        "and can't be distinguished from an honest one",
        "data sizes, budgets, who is asked and who answers are public, and whether a client answers does not depend on its data",
    ]
    if facts.run.seeded_noise:
        lines.append("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only")
    return lines


def _not_covered(facts: LocalFacts) -> tuple[str, ...]:
    evaluations = None if facts.evaluation is None else f"{facts.evaluation.num_evaluations} private evaluations"
    return not_covered(facts.run, accounts=True, logs="logs on devices", evaluations=evaluations)


def _incidents(facts: LocalFacts) -> list[str]:
    lines = list(facts.run.incidents)
    if facts.run.missing.total:
        lines.append(
            f"{facts.run.missing.total} replies that were asked for did not count: {facts.run.missing}; they are charged"
        )
    if facts.num_unasked:
        lines.append(f"{facts.num_unasked} times a client whose budget was spent was not asked")
    return lines
