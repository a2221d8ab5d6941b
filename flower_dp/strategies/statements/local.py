"""The privacy statement of a method whose clients each have a ledger of their own."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from flower_dp.privacy import accounting
from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import Adversary, ClientCosts, PaperEpsilon, PrivacyStatement, delta_warning
from flower_dp.strategies.local_level import LocalRules
from flower_dp.strategies.releases.books import ClientBooks
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.strategies.statements.not_covered import not_covered, seeded

_LISTED = 100
_ASSUMED = (
    "a client clips and adds its noise itself, by its own budget; one that does not loses its own privacy, nobody else's, "
    "and can't be distinguished from an honest one",
    "data sizes, budgets, who is asked and who answers are public, and whether a client answers does not depend on its data",
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
    """Return the statement of what the clients were charged: the worst client's epsilon, and the distribution over clients.

    Args:
        rules: the method; before the first round it knows no clients.
        state: of the run.
        run: facts of the run.
        noise: the method's numbers.
        sampling: who was asked, in words.
        paper: the paper's epsilon of the worst client.
        message_std: the smallest std of the noise on a number in a client's message, over clients and rounds, with the client's
            public weight.
        assumptions: further assumptions of this method.
        incidents: further incidents.
        adversaries: the adversaries, if they see different things; the statement's epsilon is the largest.
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
            noise = {**noise, "least_evaluation_noise_multiplier": min(multipliers)}
            events += [f"evaluation: {line}" for line in evaluations.ledger(charges, worst).lines()]
            parts = {"training": books.cost(rules.training.ledger(charges, worst)).epsilon, "evaluation": alone[worst]}
        if num_evaluations:
            paper = _of_training_alone(paper)
            adversaries = tuple(replace(one, paper=_of_training_alone(one.paper)) for one in adversaries)
    if worst is not None and not adversaries:
        adversaries = _everyone(costs[worst], message_std)
    return PrivacyStatement(
        method=rules.about.title,
        unit=releases[0].unit if releases else "record",
        relation=books.relation,
        adversary=releases[0].seen_by if releases and private else "nobody",
        delta=books.delta,
        epsilon=largest if private else math.inf,
        accountant=costs[worst].accountant if worst is not None and private else "none",
        paper=paper,
        num_rounds=num_rounds,
        noise=dict(noise),
        sampling=sampling,
        events=tuple(events),
        assumptions=(*_ASSUMED, *_delta_warning(books), *seeded(run), *assumptions),
        not_covered=not_covered(run, accounts=True, logs="logs on devices", evaluations=evaluated),
        incidents=(*_incidents(state.releases.get(rules.training.name, 0), run), *incidents),
        adversaries=adversaries if private else (),
        parts=parts if private else {},
        clients=_client_costs({name: cost.epsilon for name, cost in costs.items()}, alone) if costs and private else None,
    )


def _delta_warning(books: ClientBooks) -> tuple[str, ...]:
    """Return a line if delta promises nothing: among a client's records, or where clients are the units among these."""
    releases = [terms.release for terms in books.terms.values()]
    if not releases:
        return ()
    unit = releases[0].unit
    return delta_warning(books.delta, len(releases) if unit == "client" else max(one.num_clients for one in releases), unit)


def counts_sampling(rules: LocalRules, charges: Charges) -> bool:
    """Return whether a client's epsilon is the less because nobody else knows which of its records it draws."""
    releases = {name: terms.release for name, terms in rules.books.terms.items()}
    sampled = {name for name, one in releases.items() if one.unit == "record" and one.expected_cohort < one.num_clients}
    return any(name in sampled and accounting.counts_sampling(cost) for name, cost in _costs(rules, charges).items())


def least_and_largest(books: ClientBooks, what: str, number: Callable[[Release], float]) -> dict[str, float]:
    """Return the least and the largest noise multiplier of a client, and so of another number of its release."""
    releases = [terms.release for terms in books.terms.values()]
    numbers = {}
    for word, pick in (("least", min), ("largest", max)) if releases else ():
        numbers[f"{word}_noise_multiplier"] = pick(release.mechanism.noise_multiplier for release in releases)
        numbers[f"{word}_{what}"] = pick(map(number, releases))
    return numbers


def most_replies(books: ClientBooks) -> str:
    """Return how many replies of a client its terms allow, in words."""
    replies = sorted({terms.num_replies for terms in books.terms.values()}) or [0]
    return f"at most {replies[0]}{f' to {replies[-1]}' if len(replies) > 1 else ''} replies a client"


def _costs(rules: LocalRules, charges: Charges) -> dict[str, Cost]:
    return {name: rules.total(charges, name, ledger) for name, ledger in rules.ledgers(charges).items()}


def _of_training_alone(paper: PaperEpsilon | None) -> PaperEpsilon | None:
    if paper is None:
        return None
    why = "it is that of training alone, and metrics of private evaluations were released as well"
    return replace(paper, valid=False, reason=f"{why}; {paper.reason}")


def _everyone(cost: Cost, message_std: float) -> tuple[Adversary, ...]:
    """Return the three adversaries of a method in which every message is private: all see no more than the messages."""
    views = {
        "the server": "every message of a client",
        "participants": "models that are made of messages; their own messages tell them nothing of others'",
        "outsiders": "models that are made of messages",
    }
    return tuple(Adversary.of(name, cost, sees=sees, noise_std=message_std) for name, sees in views.items())


def _client_costs(costs: dict[str, float], evaluation: dict[str, float]) -> ClientCosts:
    return ClientCosts(
        count=len(costs),
        minimum=min(costs.values()),
        median=statistics.median(costs.values()),
        maximum=max(costs.values()),
        worst=max(costs, key=lambda name: costs[name]),
        each=costs if len(costs) <= _LISTED else {},
        evaluation=evaluation if len(costs) <= _LISTED else {},
    )


def _incidents(num_unasked: int, run: RunFacts) -> list[str]:
    lines = list(run.incidents)
    if run.missing.total:
        lines.append(f"{run.missing.total} replies that were asked for did not count: {run.missing}; they are charged")
    if num_unasked:
        lines.append(f"{num_unasked} times a client whose budget was spent was not asked")
    return lines
