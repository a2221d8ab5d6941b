"""The privacy statement of a strategy whose clients each have a ledger of their own."""

import math
import statistics
from typing import TYPE_CHECKING

from flower_dp.privacy.accounting import Cost
from flower_dp.privacy.statement import Adversary, ClientCosts, PaperEpsilon, PrivacyStatement

if TYPE_CHECKING:
    from flower_dp.strategies.local_level import LocalLevelStrategy

_LISTED = 100


def state(
    strategy: "LocalLevelStrategy",
    *,
    noise: dict[str, float] | None = None,
    paper: PaperEpsilon | None = None,
    sampling: str = "",
    assumptions: tuple[str, ...] = (),
    adversaries: tuple[Adversary, ...] = (),
) -> PrivacyStatement:
    """Return the statement of what the clients' ledgers hold: the worst client's epsilon, and the distribution over clients.

    Args:
        strategy: after its roll call; before it the statement has no clients and no rounds.
        noise: the method's numbers.
        paper: the paper's epsilon of the worst client.
        sampling: who was asked, in words.
        assumptions: what this method leans on besides.
        adversaries: where adversaries see different things; the statement's epsilon is the largest.
    """
    costs = {name: strategy.cost(ledger) for name, ledger in strategy.ledgers.items()}
    worst = max(costs, key=lambda name: costs[name].epsilon, default=None)
    largest = max([cost.epsilon for cost in costs.values()] + [entry.epsilon for entry in adversaries], default=0.0)
    release = next((terms.release for terms in strategy.terms.values()), None)
    noiseless = any(not terms.release.mechanism.noise_multiplier for terms in strategy.terms.values())
    private = (
        math.isfinite(largest) and not strategy.seeded_noise and not noiseless and (worst is not None or not strategy.num_rounds)
    )
    if not private:
        costs = {}
    return PrivacyStatement(
        method=strategy.method,
        unit=release.unit if release else "record",
        relation=strategy.relation,
        adversary=release.seen_by if release and private else "nobody",
        delta=strategy.delta,
        epsilon=largest if private else math.inf,
        accountant=costs[worst].accountant if worst in costs else "none",
        paper=paper,
        num_rounds=strategy.num_rounds,
        noise=noise or {},
        sampling=sampling or str(strategy.sampling),
        events=tuple(strategy.ledgers[worst].lines()) if worst is not None else (),
        assumptions=(*_assumptions(strategy), *assumptions),
        not_covered=tuple(_not_covered(strategy)),
        incidents=tuple(_incidents(strategy)),
        adversaries=(adversaries or _everyone(costs, worst, strategy)) if private else (),
        clients=_client_costs({name: cost.epsilon for name, cost in costs.items()}),
    )


def _everyone(costs: dict[str, Cost], worst: str | None, strategy: "LocalLevelStrategy") -> tuple[Adversary, ...]:
    """Return the three adversaries of a method in which every message is private: all see no more than the messages."""
    if worst is None:
        return ()
    release = strategy.terms[worst].release
    return tuple(
        Adversary(
            name=name,
            sees=sees,
            epsilon=costs[worst].epsilon,
            accountant=costs[worst].accountant,
            noise_std=release.noise_scale * (math.sqrt(2) if release.mechanism.norm == "l1" else 1) / release.expected_cohort,
        )
        for name, sees in (
            ("the server", "every message of a client"),
            ("participants", "models that are made of messages; their own messages tell them nothing of others'"),
            ("outsiders", "models that are made of messages"),
        )
    )


def _client_costs(costs: dict[str, float]) -> ClientCosts | None:
    if not costs:
        return None
    return ClientCosts(
        count=len(costs),
        minimum=min(costs.values()),
        median=statistics.median(costs.values()),
        maximum=max(costs.values()),
        worst=max(costs, key=lambda name: costs[name]),
        each=costs if len(costs) <= _LISTED else {},
    )


def _assumptions(strategy: "LocalLevelStrategy") -> list[str]:
    lines = [
        "a client clips and adds its noise itself, by its own budget; one that does not loses its own privacy, nobody else's, "
        "and can't be told from an honest one",
        "data sizes, budgets, who is asked and who answers are public, and whether a client answers does not depend on its data",
    ]
    if strategy.seeded_noise:
        lines.append("NOISE OR SAMPLING CAME FROM A FIXED SEED: for tests only")
    return lines


def _not_covered(strategy: "LocalLevelStrategy") -> list[str]:
    lines = [
        "other runs on the same records: a client's account lasts one run, and budgets of several runs add up",
        "everything else that is computed from client data: choice of settings, timing, logs on devices",
    ]
    if strategy.report_client_metrics:
        lines.append("CLIENT METRICS: clients sent training metrics without noise")
    return lines


def _incidents(strategy: "LocalLevelStrategy") -> list[str]:
    lines = list(strategy.incidents)
    if strategy.num_missing:
        lines.append(
            f"{strategy.num_missing} replies that were asked for did not count (missing, refused or errors); they are charged"
        )
    if strategy.num_unasked:
        lines.append(f"{strategy.num_unasked} times a client whose budget was spent was not asked")
    return lines
