"""The epsilon of given noise, and the noise for a given epsilon: flower-dp epsilon | calibrate."""

import json
from typing import Annotated, Any

import click
import typer

from flower_dp.cli.errors import refuse

MECHANISMS = ("gaussian", "laplace")
SAMPLINGS = ("full", "poisson", "fixed-size", "round-robin")
RELATIONS = ("add-or-remove-one", "replace-one")

Mechanism = Annotated[str, typer.Option(click_type=click.Choice(MECHANISMS), help="The distribution of the noise.")]
NoiseMultiplier = Annotated[
    float | None, typer.Option(help="Noise std / clip norm; laplace: scale / L1 clip norm.", show_default=False)
]
Sampling = Annotated[
    str,
    typer.Option(click_type=click.Choice(SAMPLINGS), help="How the clients of a round are chosen; full: all take part."),
]
SamplingRate = Annotated[
    float | None, typer.Option(help="poisson: the probability with which each client takes part in a round.", show_default=False)
]
CohortSize = Annotated[int | None, typer.Option(help="fixed-size, round-robin: clients in a round.", show_default=False)]
NumClients = Annotated[int | None, typer.Option(help="fixed-size, round-robin: clients in all.", show_default=False)]
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
    context: typer.Context,
    *,
    noise_multiplier: NoiseMultiplier = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "full",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: Annotated[int, typer.Option(help="Releases in all, one a round.")] = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the tight epsilon of a whole run with a given noise multiplier."""
    if noise_multiplier is None:
        refuse("--noise-multiplier is missing")
    _answer(context.params)


def calibrate(
    context: typer.Context,
    *,
    epsilon: Annotated[float | None, typer.Option(help="The largest epsilon allowed.", show_default=False)] = None,
    noise_multiplier: NoiseMultiplier = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "full",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: Annotated[int | None, typer.Option(help="Releases in all, one a round.", show_default=False)] = None,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the least noise multiplier for an epsilon and a number of rounds, or the most rounds for a noise multiplier."""
    if epsilon is None:
        refuse("--epsilon is missing")
    if (noise_multiplier is None) == (num_rounds is None):
        both = "both missing" if num_rounds is None else "both given"
        refuse(f"--noise-multiplier and --num-rounds are {both}: give one, the other is computed")
    _answer(context.params)


def _answer(options: dict[str, Any]) -> None:
    """Compute what the options leave open (epsilon, noise multiplier or number of rounds), and show the whole cost."""
    from flower_dp.privacy import planned_run

    as_json = options.pop("as_json")
    try:
        cost = planned_run.solve(**options)
    except ValueError as error:
        refuse(str(error))
    if as_json:
        typer.echo(json.dumps(cost, allow_nan=False))
        return
    for key, label in (
        ("num_rounds", "rounds"),
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
