"""A server's ledger in words and numbers."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_dp.core.words import delta_in_words, epsilon_in_words

if TYPE_CHECKING:
    from flower_dp.privacy.joint_cost import Accounts, Scope
    from flower_dp.privacy.server_ledger import ServerLedger

_MAGIC = b"SQLite format 3\0"
# Clients that are listed, those that were charged most first; all are in the JSON.
_LISTED = 20


def is_server_ledger(path: Path) -> bool:
    """Return whether a file is to be read as a server's ledger."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return path.suffix == ".sqlite"


def create(path: str, budget: float | None, delta: float | None, *, fully_adaptive: bool, renyi_order: float | None) -> None:
    """Create a server's ledger.

    Raises:
        ValueError: if it can't be created, a budget lacks its delta, or nothing would fit at the order of a fully adaptive one.
    """
    from flower_dp.privacy import renyi, renyi_filter
    from flower_dp.privacy.server_ledger import JointBudget, ServerLedger

    if budget is not None and delta is None:
        raise ValueError("--delta: a budget has no meaning without it; give the delta of the runs")
    if fully_adaptive and budget is None:
        raise ValueError("--fully-adaptive: is of a budget; add --budget")
    limit = None
    if budget is not None and delta is not None:
        limit = JointBudget(epsilon=budget, delta=delta, fully_adaptive=fully_adaptive, renyi_order=renyi_order)
        if (order := limit.renyi_order) and (order > renyi.ORDERS[-1] or renyi_filter.allowance(budget, delta, order) <= 0):
            raise ValueError(f"--renyi-order={order:g}: is above 1024, or nothing fits into {limit}")
    ServerLedger.create(path, limit)


def read(path: Path, delta: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return what a server's ledger says, as JSON values and as lines.

    Raises:
        ValueError: if the file can't be used.
    """
    from flower_dp.privacy.server_ledger import ServerLedger

    with ServerLedger(path, read_only=True) as ledger:
        budget = ledger.budget
        at = delta if delta is not None else _delta(ledger)
        runs, clients = _runs(ledger, at), _clients(ledger, at)
        joint = _joint(ledger.accounts, at, ledger.num_runs_by_scope)
    told = {
        "budget": None if budget is None else asdict(budget),
        "delta": at,
        "runs": runs,
        "clients": clients,
        "joint": joint,
    }
    lines = [_run_line(name, run) for name, run in runs.items()] or ["no run yet"]
    for one in joint:
        lines += _client_lines(clients, one)
        lines.append(
            f"{_runs_together(one['runs'])} ({one['unit']}, {one['relation']}): epsilon {_shown(one['epsilon'])} at delta "
            f"{delta_in_words(at)}, accountant {one['accountant']}, for the client who was charged most"
        )
    if len(joint) > 1:
        lines.append("no accountant adds up costs of different units or relations: they are apart")
    if budget is not None:
        holds = ", whatever decides the settings of a run (fully adaptive)" if budget.fully_adaptive else ""
        lines.append(f"budget of all runs together: epsilon {budget.epsilon:g} at delta {delta_in_words(budget.delta)}{holds}")
    return told, lines


def _delta(ledger: "ServerLedger") -> float:
    """Return the delta of the budget, else the least one of the runs' statements."""
    if ledger.budget is not None:
        return ledger.budget.delta
    return min((run.delta for run in ledger.runs if run.delta > 0), default=1e-5)


def _runs(ledger: "ServerLedger", delta: float) -> dict[str, dict[str, Any]]:
    alone, numbers = ledger.accounts_by_run(), ledger.numbers_by_run()
    return {
        run.name: {
            "method": run.method,
            "started": run.started,
            "private": run.private,
            "charges": numbers[run.name],
            "epsilon": [_cost(alone[run.name], scope, delta) for scope in alone[run.name].scopes],
        }
        for run in ledger.runs
    }


def _cost(accounts: "Accounts", scope: "Scope", delta: float) -> dict[str, Any]:
    cost = accounts.of(scope).worst(delta)
    return {"unit": scope.unit, "relation": scope.relation, "epsilon": _finite(cost.epsilon), "accountant": cost.accountant}


def _joint(accounts: "Accounts", delta: float, num_runs: dict["Scope", int]) -> list[dict[str, Any]]:
    return [{**_cost(accounts, scope, delta), "runs": num_runs[scope]} for scope in accounts.scopes]


def _clients(ledger: "ServerLedger", delta: float) -> dict[str, list[dict[str, Any]]]:
    """Return what every client has cost over all runs, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for scope in ledger.accounts.scopes:
        histories = ledger.accounts.of(scope)
        for name, owner in ledger.owners.items():
            if histories.has(owner):
                epsilon = _finite(histories.cost(owner, delta).epsilon)
                found.setdefault(name, []).append({"unit": scope.unit, "relation": scope.relation, "epsilon": epsilon})
    return found


def _client_lines(clients: dict[str, list[dict[str, Any]]], of: dict[str, Any]) -> list[str]:
    """Return a line of each client who was charged most."""
    costs = {
        name: math.inf if one["epsilon"] is None else one["epsilon"]
        for name, entries in clients.items()
        for one in entries
        if (one["unit"], one["relation"]) == (of["unit"], of["relation"])
    }
    first = sorted(costs, key=lambda name: (-costs[name], name))
    lines = [f"  {name}: epsilon {_shown(_finite(costs[name]))}" for name in first[:_LISTED]]
    if len(first) > _LISTED:
        lines.append(f"  and {len(first) - _LISTED} others, with less: --json has all")
    return lines


def _run_line(name: str, run: dict[str, Any]) -> str:
    charges = ", ".join(f"{number} x {release}" for release, number in run["charges"].items()) or "no charge"
    costs = "; ".join(f"epsilon {_shown(one['epsilon'])} ({one['unit']}, {one['relation']})" for one in run["epsilon"])
    seeded = "" if run["private"] else ", noise from a fixed seed"
    return f"run {name[:8]}, {run['method']}, {run['started']}{seeded}: {charges}{'; ' * bool(costs)}{costs}"


def _runs_together(number: int) -> str:
    return "one run" if number == 1 else f"all {number} runs together"


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def _shown(epsilon: float | None) -> str:
    return "infinite: not private" if epsilon is None else epsilon_in_words(epsilon)
