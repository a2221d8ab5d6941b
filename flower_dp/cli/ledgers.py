"""The privacy budgets that clients have spent, on a device or on the server: flower-dp ledger."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flower_dp.cli.options import AsJson, given, refusing
from flower_dp.core import checks, dp_events
from flower_dp.core.formatting import finite_or_none, format_delta, format_epsilon

if TYPE_CHECKING:
    from flower_dp.privacy.charges import Charges, CostScope
    from flower_dp.privacy.device_store import ClientAccount
    from flower_dp.privacy.ledger_tables import RunRow
    from flower_dp.privacy.store import Store

# Of a device's ledger, and of a server's without a run.
_DELTA = 1e-5
# Options with those without which they mean nothing.
_NEEDED = {
    "--budget": ("--create-server", "--delta"),
    "--fully-adaptive": ("--create-server", "--budget"),
    "--renyi-order": ("--fully-adaptive",),
}
# Clients that are listed, those that were charged most first; all are in the JSON.
_LISTED = 20


def ledger(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A device's ledger file, a server's, or the folder of a run or its checkpoints.")
    ],
    *,
    create: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Create a device's ledger, with an account for this client; may be repeated."),
    ] = None,
    create_server: Annotated[bool, typer.Option("--create-server", help="Create a server's ledger, for several runs.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(metavar="EPSILON", help="With --create-server: what all runs together may cost any client, at --delta."),
    ] = None,
    fully_adaptive: Annotated[
        bool,
        typer.Option(
            "--fully-adaptive",
            help="With --budget: it holds also if settings of a run are chosen by what earlier ones released. Fewer rounds fit.",
        ),
    ] = False,
    renyi_order: Annotated[
        float | None,
        typer.Option(
            help="With --fully-adaptive: the order of the Renyi divergences that are added up. By default the best one for noise "
            "without sampling; flower_dp.privacy.renyi_filter.order_for computes that for what will be charged."
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="The delta at which epsilon is computed, if it is not pure. By default that of a server's budget, else the "
            "least one of the ledger's runs; 1e-5 for a device's ledger."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what clients have spent of their budgets, or create a ledger.

    A device's ledger has an account of every client; one that also takes part in private evaluations has two, and both together
    cost their sum. A server's ledger has the charges of all runs on its clients: it is shown by run, by client, and with what all
    runs together have cost.

    Exit status: 0, or 2 with a line that says why the file can't be used.
    """
    with refusing():
        if delta is not None:
            checks.number("--delta", delta, above=0, below=1)
        options = given().values()
        for option, others in _NEEDED.items():
            if option in options and (missing := [one for one in others if one not in options]):
                raise ValueError(f"{option}: means nothing without {missing[0]}")
        if create and create_server:
            raise ValueError("--create: is of a device's ledger; leave out --create-server")
        if create_server:
            _create_server(path, budget, delta or 0.0, fully_adaptive=fully_adaptive, renyi_order=renyi_order)
        told, lines = _read(path, create, delta)
    typer.echo(json.dumps(told, allow_nan=False) if as_json else "\n".join(lines))


def _create_server(path: str, budget: float | None, delta: float, *, fully_adaptive: bool, renyi_order: float | None) -> None:
    """Create a server's ledger.

    Raises:
        ValueError: if it can't be created, or nothing would fit at the order of a fully adaptive budget.
    """
    from flower_dp.privacy import renyi, renyi_filter
    from flower_dp.privacy.budget import LedgerBudget
    from flower_dp.privacy.store import Store

    limit = None
    if budget is not None:
        limit = LedgerBudget(epsilon=budget, delta=delta, fully_adaptive=fully_adaptive, renyi_order=renyi_order)
        if (order := limit.renyi_order) and (order > renyi.ORDERS[-1] or renyi_filter.allowance(budget, delta, order) <= 0):
            raise ValueError(f"--renyi-order={order:g}: is above 1024, or nothing fits into {limit}")
    Store.create(path, limit)


def _read(path: str, create: list[str] | None, delta: float | None) -> tuple[dict[str, Any], list[str]]:
    """Return what a ledger says, as JSON values and as lines; it is created first for the clients of a device."""
    from flower_dp.privacy.device_store import DeviceLedger
    from flower_dp.privacy.store import Store

    if create:
        DeviceLedger.create(path, create)
    place = Path(path)
    inside = (place / "ledger.sqlite", place / "checkpoint" / "ledger.sqlite")
    if place.is_dir() and (place := next(filter(Path.exists, inside), place)).is_dir():
        raise ValueError(f"{path}: is a folder without a ledger: must have ledger.sqlite or checkpoint/ledger.sqlite, as a run's")
    with Store(place, read_only=True) as store:
        if not store.clients:
            return _server(store, delta)
        return _device(DeviceLedger(store.path).read(), _DELTA if delta is None else delta)


# A device's ledger


def _device(entries: dict[str, "ClientAccount"], delta: float) -> tuple[dict[str, Any], list[str]]:
    accounts = {name: _account(entry, delta) for name, entry in entries.items()}
    totals, lines = _totals(accounts), []
    for name, account in accounts.items():
        if account["terms"] is None:
            lines.append(f"{name}: no reply yet, no terms")
            continue
        lines.append(f"{name}: {account['replies']} of {account['num_replies']} replies, {_spent(account)}")
        lines.append(f"  terms: {account['terms']}")
    lines += [f"{name}, in total: {_spent(total)}" for name, total in totals.items()]
    return {"clients": accounts, "totals": totals}, lines


def _spent(cost: dict[str, Any]) -> str:
    return f"epsilon {_shown(cost['epsilon'])} at delta {format_delta(cost['delta'])} ({cost['relation']})"


def _account(entry: "ClientAccount", delta: float) -> dict[str, Any]:
    """Return one account: the number of replies and their cost; an epsilon of None is infinite."""
    if entry.terms is None:
        return {"replies": 0, "num_replies": None, "epsilon": 0.0, "delta": 0.0, "terms": None}
    at = 0.0 if all(isinstance(event, dp_events.LaplaceDpEvent) for event in entry.counts) else delta
    return {
        "replies": entry.replies,
        "num_replies": entry.num_replies,
        "epsilon": finite_or_none(entry.spent.cost(at).epsilon),
        "delta": at,
        "relation": entry.relation,
        "terms": entry.terms,
    }


def _totals(accounts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what training and evaluations cost together, by client: the sum of their epsilons, for evaluations have delta 0."""
    from flower_dp.privacy.device_store import evaluation_account

    totals = {}
    for name, training in accounts.items():
        evaluation = accounts.get(evaluation_account(name), {"terms": None})
        if None in (training["terms"], evaluation["terms"]) or training["relation"] != evaluation["relation"]:
            continue
        parts = [training["epsilon"], evaluation["epsilon"]]
        totals[name] = {
            "epsilon": None if None in parts else sum(parts),
            "delta": training["delta"] + evaluation["delta"],
            "relation": training["relation"],
        }
    return totals


# A server's ledger


def _server(store: "Store", delta: float | None) -> tuple[dict[str, Any], list[str]]:
    budget, runs = store.budget, store.runs
    if delta is None:
        least = min((run.delta for run in runs.values() if run.delta > 0), default=_DELTA)
        delta = least if budget is None else budget.delta
    told: dict[str, Any] = {
        "budget": None if budget is None else asdict(budget),
        "delta": delta,
        "runs": {name: _run(run, store.charges[name], delta) for name, run in runs.items()},
        "clients": _clients(store.all, delta),
        "joint": [{**cost, "runs": len(store.all.runs(scope))} for scope, cost in _costs(store.all, delta)],
    }
    lines = [_run_line(name, run) for name, run in told["runs"].items()] or ["no run yet"]
    for one in told["joint"]:
        lines += _client_lines(told["clients"], one)
        together = "one run" if one["runs"] == 1 else f"all {one['runs']} runs together"
        lines.append(
            f"{together} ({one['unit']}, {one['relation']}): epsilon {_shown(one['epsilon'])} at delta {format_delta(delta)}, "
            f"accountant {one['accountant']}, for the client who was charged most"
        )
    if len(told["joint"]) > 1:
        lines.append("no accountant adds up costs of different units or relations: they are apart")
    if budget is not None:
        holds = ", whatever decides the settings of a run (fully adaptive)" if budget.fully_adaptive else ""
        lines.append(f"budget of all runs together: epsilon {budget.epsilon:g} at delta {format_delta(budget.delta)}{holds}")
    return told, lines


def _costs(charges: "Charges", delta: float) -> "list[tuple[CostScope, dict[str, Any]]]":
    """Return by scope what the client who was charged most has cost."""
    worst = [(scope, charges.cost_of_most_charged(scope, delta)) for scope in charges.scopes]
    return [(scope, {**_of(scope, cost.epsilon), "accountant": cost.accountant}) for scope, cost in worst]


def _of(scope: "CostScope", epsilon: float) -> dict[str, Any]:
    return {"unit": scope.unit, "relation": scope.relation, "epsilon": finite_or_none(epsilon)}


def _run(run: "RunRow", charges: "Charges", delta: float) -> dict[str, Any]:
    return {
        "method": run.method,
        "started": run.started,
        "private": run.private,
        "charges": charges.numbers(),
        "epsilon": [cost for _, cost in _costs(charges, delta)],
    }


def _clients(charges: "Charges", delta: float) -> dict[str, list[dict[str, Any]]]:
    """Return what every client has cost over all runs, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for scope in charges.scopes:
        costs: dict[Any, float] = {}  # many clients have one history
        for name in charges.owners(scope):
            history = charges.history(scope, name)
            key = frozenset(history.counts.items())
            if key not in costs:
                costs[key] = history.cost(delta).epsilon
            found.setdefault(name, []).append(_of(scope, costs[key]))
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
    lines = [f"  {name}: epsilon {_shown(finite_or_none(costs[name]))}" for name in first[:_LISTED]]
    if len(first) > _LISTED:
        lines.append(f"  and {len(first) - _LISTED} others, with less: --json has all")
    return lines


def _run_line(name: str, run: dict[str, Any]) -> str:
    charges = ", ".join(f"{number} x {release}" for release, number in run["charges"].items()) or "no charge"
    costs = "; ".join(f"epsilon {_shown(one['epsilon'])} ({one['unit']}, {one['relation']})" for one in run["epsilon"])
    seeded = "" if run["private"] else ", noise from a fixed seed"
    return f"run {name[:8]}, {run['method']}, {run['started']}{seeded}: {charges}{'; ' * bool(costs)}{costs}"


def _shown(epsilon: float | None) -> str:
    return "infinite: not private" if epsilon is None else format_epsilon(epsilon)
