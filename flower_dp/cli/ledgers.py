"""The privacy budgets that a device's clients have spent: flower-dp ledger."""

import json
import math
from typing import Annotated, Any

import typer

from flower_dp.cli.errors import refuse


def ledger(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The device's ledger file.", show_default=False)],
    *,
    create: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Create the file, with an account for this client; may be repeated.", show_default=False
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="The delta at which epsilon is computed, if it is not pure.")] = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help="Answer with a JSON object.")] = False,
) -> None:
    """Show what the clients of a device have spent of their budgets, or create their ledger.

    A client that also takes part in private evaluations has an account of them, and both accounts together cost their sum.

    Exit status: 0, or 2 with a line that says why the file can't be used.
    """
    from flower_dp.core import checks
    from flower_dp.privacy.ledger_file import LedgerFile

    try:
        checks.number("--delta", delta, above=0, below=1)
        found = LedgerFile.create(file, create) if create else LedgerFile(file)
        accounts = {name: _account(entry, delta) for name, entry in found.read().items()}
    except ValueError as error:
        refuse(str(error))
    totals = _totals(accounts)
    if as_json:
        typer.echo(json.dumps({"clients": accounts, "totals": totals}, allow_nan=False))
        return
    for name, account in accounts.items():
        typer.echo(_line(name, account))
    for name, total in totals.items():
        typer.echo(f"{name}, in total: epsilon {_shown(total['epsilon'])} at delta {total['delta']:g} ({total['relation']})")


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
    return "infinite: not private" if epsilon is None else f"{epsilon:.4f}"


def _pure(event: Any) -> bool:
    import dp_accounting

    return isinstance(event, dp_accounting.LaplaceDpEvent)


def _line(name: str, account: dict[str, Any]) -> str:
    if account["terms"] is None:
        return f"{name}: no reply yet, no terms"
    cost = f"epsilon {_shown(account['epsilon'])} at delta {account['delta']:g}"
    spent = f"{account['replies']} of {account['num_replies']} replies, {cost}"
    return f"{name}: {spent} ({account['relation']})\n  terms: {account['terms']}"
