"""The privacy budgets that clients have spent, on a device or on the server: flower-dp ledger."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_dp.cli.errors import refuse


def ledger(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A device's ledger file, a server's, or the folder of a run that has one.", show_default=False
        ),
    ],
    *,
    create: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Create a device's ledger, with an account for this client; may be repeated.",
            show_default=False,
        ),
    ] = None,
    create_server: Annotated[bool, typer.Option("--create-server", help="Create a server's ledger, for several runs.")] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="EPSILON",
            help="With --create-server: what all runs together may cost any client, at --delta.",
            show_default=False,
        ),
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
            "without sampling; flower_dp.privacy.renyi_filter.order_for computes that for what will be charged.",
            show_default=False,
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="The delta at which epsilon is computed, if it is not pure. By default that of a server's budget, else the "
            "least one of the ledger's runs; 1e-5 for a device's ledger.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer with a JSON object.")] = False,
) -> None:
    """Show what clients have spent of their budgets, or create a ledger.

    A device's ledger has an account of every client; one that also takes part in private evaluations has two, and both together
    cost their sum. A server's ledger has the charges of all runs on its clients: it is shown by run, by client, and with what all
    runs together have cost.

    Exit status: 0, or 2 with a line that says why the file can't be used.
    """
    from flower_dp.cli import device_ledger, server_ledger
    from flower_dp.core import checks

    try:
        if delta is not None:
            checks.number("--delta", delta, above=0, below=1)
        if budget is not None and not create_server:
            raise ValueError("--budget: is of a server's ledger; add --create-server")
        if fully_adaptive and not create_server:
            raise ValueError("--fully-adaptive: is of a server's ledger; add --create-server")
        if renyi_order is not None and not fully_adaptive:
            raise ValueError("--renyi-order: is of a fully adaptive budget; add --fully-adaptive")
        if create and create_server:
            raise ValueError("--create: is of a device's ledger; leave out --create-server")
        if create_server:
            server_ledger.create(path, budget, delta, fully_adaptive=fully_adaptive, renyi_order=renyi_order)
        place = _found(path)
        if create or not server_ledger.is_server_ledger(place):
            told, lines = device_ledger.read(path, create, 1e-5 if delta is None else delta)
        else:
            told, lines = server_ledger.read(place, delta)
    except ValueError as error:
        refuse(str(error))
    _answer(told, lines, as_json=as_json)


def _found(path: str) -> Path:
    """Return the file of a ledger, also of that in the folder of a run."""
    place = Path(path)
    if not place.is_dir():
        return place
    if not (inside := place / "checkpoint" / "ledger.sqlite").exists():
        raise ValueError(f"{path}: is a folder without a ledger: must have checkpoint/ledger.sqlite, as that of a run has")
    return inside


def _answer(told: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, allow_nan=False))
        return
    for line in lines:
        typer.echo(line)
