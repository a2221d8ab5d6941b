"""A device's ledger in words and numbers."""

import math
from typing import Any

from flower_dp.core import dp
from flower_dp.core.words import delta_in_words, epsilon_in_words


def read(path: str, create: list[str] | None, delta: float) -> tuple[dict[str, Any], list[str]]:
    """Return what a device's ledger says, as JSON values and as lines.

    Args:
        path: of the file.
        create: names of clients, for whom it is created first; None for a file that exists.
        delta: at which epsilon is computed, if it is not pure.

    Raises:
        ValueError: if the file can't be used.
    """
    from flower_dp.privacy.ledger_file import LedgerFile

    found = LedgerFile.create(path, create) if create else LedgerFile(path)
    accounts = {name: _account(entry, delta) for name, entry in found.read().items()}
    totals = _totals(accounts)
    lines = [_line(name, account) for name, account in accounts.items()]
    for name, total in totals.items():
        spent = f"epsilon {_shown(total['epsilon'])} at delta {delta_in_words(total['delta'])}"
        lines.append(f"{name}, in total: {spent} ({total['relation']})")
    return {"clients": accounts, "totals": totals}, lines


def _account(entry: Any, delta: float) -> dict[str, Any]:
    """Return one account: the number of replies and their cost; an epsilon of None is infinite."""
    from flower_dp.privacy import accounting

    if entry.terms is None:
        return {"replies": 0, "num_replies": None, "epsilon": 0.0, "delta": 0.0, "terms": None}
    cost = accounting.epsilon(entry.spent, delta=0.0 if _pure(entry.event) else delta, relation=entry.relation)
    return {
        "replies": entry.replies,
        "num_replies": entry.num_replies,
        "epsilon": cost.epsilon if math.isfinite(cost.epsilon) else None,
        "delta": 0.0 if _pure(entry.event) else delta,
        "relation": entry.relation,
        "terms": entry.terms,
    }


def _totals(accounts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what training and evaluations cost together, by client: the sum of their epsilons, for evaluations have delta 0."""
    from flower_dp.privacy.ledger_file import evaluation_account

    totals = {}
    for name, training in accounts.items():
        evaluation = accounts.get(evaluation_account(name))
        if evaluation is None or None in (training["terms"], evaluation["terms"]):
            continue
        if training["relation"] != evaluation["relation"]:
            continue
        parts = [training["epsilon"], evaluation["epsilon"]]
        totals[name] = {
            "epsilon": None if None in parts else sum(parts),
            "delta": training["delta"] + evaluation["delta"],
            "relation": training["relation"],
        }
    return totals


def _shown(epsilon: float | None) -> str:
    return "infinite: not private" if epsilon is None else epsilon_in_words(epsilon)


def _pure(event: Any) -> bool:
    return isinstance(event, dp.LaplaceDpEvent)


def _line(name: str, account: dict[str, Any]) -> str:
    if account["terms"] is None:
        return f"{name}: no reply yet, no terms"
    cost = f"epsilon {_shown(account['epsilon'])} at delta {delta_in_words(account['delta'])}"
    spent = f"{account['replies']} of {account['num_replies']} replies, {cost}"
    return f"{name}: {spent} ({account['relation']})\n  terms: {account['terms']}"
