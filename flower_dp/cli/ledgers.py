"""Command group flower-dp ledger: show or create a privacy ledger, of a device or of a server."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flower_dp.cli.options import AsJson, given_options, refusing
from flower_dp.core import checks, dp_events
from flower_dp.core.formatting import finite_or_none, format_delta, format_epsilon

if TYPE_CHECKING:
    from flower_dp.privacy.charges import Charges, CostScope
    from flower_dp.privacy.device_store import ClientAccount
    from flower_dp.privacy.ledger_tables import RunRow
    from flower_dp.privacy.store import Store

app = typer.Typer(help="Show or create a privacy ledger: a device's, or a server's for several runs.")
# Default delta of a device's ledger, and of a server's without a run.
_DELTA = 1e-5
# Options of create-server, each with the option that it needs.
_NEEDED = {"--budget": "--delta", "--delta": "--budget", "--fully-adaptive": "--budget", "--renyi-order": "--fully-adaptive"}
# Clients that are listed, most-charged first; the JSON has all.
_LISTED = 20

NewLedger = Annotated[Path, typer.Argument(metavar="PATH", help="The ledger's new file.")]


@app.command()
def show(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A device's ledger file, a server's, or the folder of a run or its checkpoints."),
    ],
    *,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of the epsilons that are not pure, in (0, 1). Default: that of a server's budget, else the smallest of "
            "the ledger's runs; 1e-5 for a device's ledger."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what clients have spent of their budgets.

    A device's ledger has one account per client, and a second one for a client that takes part in private evaluations. Both
    together cost their sum.
    A server's ledger has the charges of all its runs: they are shown by run, by client, and as one joint epsilon.

    Exit status: 0, or 2 with a line that says why the file can't be used.
    """
    with refusing():
        if delta is not None:
            checks.number("--delta", delta, above=0, below=1)
        ledger, lines = _read(path, delta)
    typer.echo(json.dumps(ledger, allow_nan=False) if as_json else "\n".join(lines))


@app.command()
def create_device(
    path: NewLedger,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The clients that get an account.")],
) -> None:
    """Create a device's ledger, with an account for each of its clients.

    Exit status: 0, or 2 with a line that says why the file can't be created.
    """
    from flower_dp.privacy.device_store import DeviceLedger

    with refusing():
        DeviceLedger.create(path, names)
        _, lines = _read(path)
    typer.echo("\n".join(lines))


@app.command()
def create_server(
    path: NewLedger,
    *,
    budget: Annotated[
        float | None,
        typer.Option(metavar="EPSILON", help="The most that all runs together may cost any client, at --delta. Default: none."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The delta of --budget, in (0, 1).")] = None,
    fully_adaptive: Annotated[
        bool,
        typer.Option(
            "--fully-adaptive",
            help="Let --budget hold also if released results of earlier runs decide settings of later ones. Fewer rounds fit.",
        ),
    ] = False,
    renyi_order: Annotated[
        float | None,
        typer.Option(
            help="The order at which --fully-adaptive adds up Renyi divergences, at most 1024. Default: the best one for noise "
            "without sampling; flower_dp.privacy.renyi_filter.order_for computes that for the planned charges."
        ),
    ] = None,
) -> None:
    """Create a server's ledger, for several runs on the same clients.

    Exit status: 0, or 2 with a line that names the invalid option, or says why the file can't be created.
    """
    from flower_dp.privacy import renyi, renyi_filter
    from flower_dp.privacy.budget import LedgerBudget
    from flower_dp.privacy.store import Store

    options = given_options().values()
    with refusing():
        for option, needed in _NEEDED.items():
            if option in options and needed not in options:
                raise ValueError(f"{option}: needs {needed}")
        limit = None
        if budget is not None and delta is not None:
            checks.number("--delta", delta, above=0, below=1)
            limit = LedgerBudget(epsilon=budget, delta=delta, fully_adaptive=fully_adaptive, renyi_order=renyi_order)
            if (order := limit.renyi_order) and (order > renyi.ORDERS[-1] or renyi_filter.allowance(budget, delta, order) <= 0):
                raise ValueError(f"--renyi-order={order:g}: is above 1024, or nothing fits into {limit}")
        Store.create(path, limit)
        _, lines = _read(path)
    typer.echo("\n".join(lines))


def _read(path: Path, delta: float | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a ledger, as JSON values and as lines."""
    from flower_dp.privacy.device_store import DeviceLedger
    from flower_dp.privacy.store import Store

    file = path
    if path.is_dir():
        inside = (path / "ledger.sqlite", path / "checkpoint" / "ledger.sqlite")
        if (file := next(filter(Path.exists, inside), path)).is_dir():
            raise ValueError(
                f"{path}: is a folder without a ledger: must have ledger.sqlite or checkpoint/ledger.sqlite, as a run's"
            )
    with Store(file, read_only=True) as store:
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
    """Return one account: the number of replies and their cost. An epsilon of None is infinite."""
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
    """Return the cost of all accounts together, by client with several: the sums of their epsilons and of their deltas."""
    from flower_dp.privacy.device_store import owner_of

    parts: dict[str, list[dict[str, Any]]] = {}
    for name, account in accounts.items():
        if account["terms"] is not None:
            parts.setdefault(owner_of(name), []).append(account)
    return {
        name: {
            "epsilon": None if None in (epsilons := [each["epsilon"] for each in several]) else sum(epsilons),
            "delta": sum(each["delta"] for each in several),
            "relation": several[0]["relation"],
        }
        for name, several in parts.items()
        if len(several) > 1 and len({each["relation"] for each in several}) == 1
    }


# A server's ledger


def _server(store: "Store", delta: float | None) -> tuple[dict[str, Any], list[str]]:
    budget, runs = store.budget, store.runs
    if delta is None:
        least = min((run.delta for run in runs.values() if run.delta > 0), default=_DELTA)
        delta = least if budget is None else budget.delta
    content: dict[str, Any] = {
        "budget": None if budget is None else asdict(budget),
        "delta": delta,
        "runs": {name: _run(run, store.charges[name], delta) for name, run in runs.items()},
        "clients": _clients(store.all, delta),
        "joint": [{**cost, "runs": len(store.all.runs(scope))} for scope, cost in _costs(store.all, delta)],
    }
    lines = [_run_line(name, run) for name, run in content["runs"].items()] or ["no run yet"]
    for cost in content["joint"]:
        lines += _client_lines(content["clients"], cost)
        together = "one run" if cost["runs"] == 1 else f"all {cost['runs']} runs together"
        lines.append(
            f"{together} ({cost['unit']}, {cost['relation']}): epsilon {_shown(cost['epsilon'])} at delta {format_delta(delta)}, "
            f"accountant {cost['accountant']}, for the most-charged client"
        )
    if len(content["joint"]) > 1:
        lines.append("costs of different units or relations are apart: no accountant adds them up")
    if budget is not None:
        holds = ", however the settings of a run are chosen (fully adaptive)" if budget.fully_adaptive else ""
        lines.append(f"budget of all runs together: epsilon {budget.epsilon:g} at delta {format_delta(budget.delta)}{holds}")
    return content, lines


def _costs(charges: "Charges", delta: float) -> "list[tuple[CostScope, dict[str, Any]]]":
    """Return the cost of the most-charged client, by scope."""
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
    """Return the cost of every client over all runs, by name."""
    costs_by_client: dict[str, list[dict[str, Any]]] = {}
    for scope in charges.scopes:
        costs: dict[Any, float] = {}  # many clients share one history
        for name in charges.owners(scope):
            history = charges.history(scope, name)
            key = frozenset(history.counts.items())
            if key not in costs:
                costs[key] = history.cost(delta).epsilon
            costs_by_client.setdefault(name, []).append(_of(scope, costs[key]))
    return costs_by_client


def _client_lines(clients: dict[str, list[dict[str, Any]]], of: dict[str, Any]) -> list[str]:
    """Return a line for each of the most-charged clients."""
    costs = {
        name: math.inf if cost["epsilon"] is None else cost["epsilon"]
        for name, entries in clients.items()
        for cost in entries
        if (cost["unit"], cost["relation"]) == (of["unit"], of["relation"])
    }
    first = sorted(costs, key=lambda name: (-costs[name], name))
    lines = [f"  {name}: epsilon {_shown(finite_or_none(costs[name]))}" for name in first[:_LISTED]]
    if len(first) > _LISTED:
        lines.append(f"  and {len(first) - _LISTED} others, with no more; --json has all")
    return lines


def _run_line(name: str, run: dict[str, Any]) -> str:
    charges = ", ".join(f"{number} x {release}" for release, number in run["charges"].items()) or "no charge"
    costs = "; ".join(f"epsilon {_shown(cost['epsilon'])} ({cost['unit']}, {cost['relation']})" for cost in run["epsilon"])
    seeded = "" if run["private"] else ", noise from a fixed seed"
    return f"run {name[:8]}, {run['method']}, {run['started']}{seeded}: {charges}{'; ' * bool(costs)}{costs}"


def _shown(epsilon: float | None) -> str:
    return "infinite: not private" if epsilon is None else format_epsilon(epsilon)
