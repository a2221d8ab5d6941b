"""What noise costs, and what a budget buys: flower-dp epsilon | calibrate."""

import json
from typing import Annotated, Any

import click
import typer

from flower_dp.cli.errors import refuse

MECHANISMS = ("gaussian", "laplace")
SAMPLINGS = ("full", "poisson", "fixed-size", "round-robin")
RELATIONS = ("add-or-remove-one", "replace-one")

Mechanism = Annotated[str, typer.Option(click_type=click.Choice(MECHANISMS), help="What noise a release gets.")]
Sampling = Annotated[
    str,
    typer.Option(click_type=click.Choice(SAMPLINGS), help="How the clients of a round are drawn; full: all take part."),
]
SamplingRate = Annotated[float | None, typer.Option(help="poisson: each client's chance to be in a round.", show_default=False)]
CohortSize = Annotated[int | None, typer.Option(help="fixed-size, round-robin: clients in a round.", show_default=False)]
NumClients = Annotated[int | None, typer.Option(help="fixed-size, round-robin: clients in all.", show_default=False)]
NumRounds = Annotated[int, typer.Option(help="Releases in all, one a round.")]
Delta = Annotated[
    float | None, typer.Option(help="Delta of the guarantee; 0 (laplace only) for pure epsilon.", show_default=False)
]
RelationOption = Annotated[
    str | None,
    typer.Option(
        click_type=click.Choice(RELATIONS),
        help="Which data sets are neighbours. Default: add-or-remove-one; with fixed-size replace-one.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer with a JSON object.")]


def epsilon(
    *,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise std / clip norm; laplace: scale / L1 clip norm.", show_default=False),
    ] = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "full",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: NumRounds = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a noise multiplier costs: the tight epsilon of a whole run."""
    from flower_dp.core import checks
    from flower_dp.privacy import planned_run

    try:
        if noise_multiplier is None:
            raise ValueError("--noise-multiplier is missing")
        noise = checks.number("--noise-multiplier", noise_multiplier, at_least=0)
        plan = planned_run.from_options(
            mechanism=mechanism,
            sampling=sampling,
            sampling_rate=sampling_rate,
            cohort_size=cohort_size,
            num_clients=num_clients,
            num_rounds=num_rounds,
            delta=delta,
            relation=relation,
        )
        _answer(plan.cost(noise), as_json)
    except ValueError as error:
        refuse(str(error))


def calibrate(
    *,
    epsilon: Annotated[float | None, typer.Option(help="The largest epsilon allowed.", show_default=False)] = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "full",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: NumRounds = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Tell the least noise multiplier that keeps a whole run within an epsilon."""
    from flower_dp.core import checks
    from flower_dp.privacy import planned_run

    try:
        if epsilon is None:
            raise ValueError("--epsilon is missing")
        target = checks.number("--epsilon", epsilon, above=0)
        plan = planned_run.from_options(
            mechanism=mechanism,
            sampling=sampling,
            sampling_rate=sampling_rate,
            cohort_size=cohort_size,
            num_clients=num_clients,
            num_rounds=num_rounds,
            delta=delta,
            relation=relation,
        )
        _answer(plan.cost(plan.calibrate(target)) | {"target_epsilon": target}, as_json)
    except ValueError as error:
        refuse(str(error))


def _answer(cost: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(cost, allow_nan=False))
        return
    for key, label in (
        ("noise_multiplier", "noise multiplier"),
        ("epsilon", "epsilon"),
        ("epsilon_rdp", "epsilon by RDP"),
        ("delta", "delta"),
        ("relation", "relation"),
        ("accountant", "accountant"),
    ):
        if key in cost:
            value = "infinite: not private" if cost[key] is None else cost[key]
            typer.echo(f"{label:<16}  {value:.6g}" if isinstance(value, float) else f"{label:<16}  {value}")
