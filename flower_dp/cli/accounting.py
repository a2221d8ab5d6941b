"""Commands flower-dp epsilon and calibrate: the epsilon of given noise, and the noise for a given epsilon."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from flower_dp.cli.options import AsJson, Settings, given_options, refuse, refusing
from flower_dp.core.formatting import finite_or_none, format_rounded_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flower_dp.privacy.selection import RunCountLaw

# In the order of a statement.
_ADVERSARIES = ("outsiders", "participants", "the server")
_NOT_OF_RELEASES = ("target", "setting", "as_json", "best_of_mean", "best_of_shape")
# If the number of clients is unknown, warn from this delta on: it is below 1 / n only for n < 100 clients.
_LARGE_DELTA = 0.01
_LABELS = {
    "num_rounds": "rounds",
    "noise_multiplier": "noise multiplier",
    "epsilon_rdp": "epsilon by RDP",
    "best_of_mean": "best of, mean",
    "best_of_shape": "best of, shape",
    "best_of_epsilon": "epsilon of best",
    "best_of_accountant": "its accountant",
}
_SHOWN = (
    *("method", "num_rounds", "noise_multiplier", "epsilon", "epsilon_rdp", "delta", "relation", "accountant"),
    *(f"against {adversary}" for adversary in _ADVERSARIES),
    *("best_of_mean", "best_of_shape", "best_of_epsilon", "best_of_accountant"),
)
RELATIONS = ("add-or-remove-one", "replace-one")

Mechanism = Annotated[str, typer.Option(click_type=click.Choice(("gaussian", "laplace")), help="The distribution of the noise.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise std / clip norm; laplace: scale / L1 clip norm.")]
Sampling = Annotated[
    str,
    typer.Option(
        click_type=click.Choice(("full", "poisson", "fixed-size", "round-robin")),
        help="How the clients of a round are sampled; full: all clients take part.",
    ),
]
SamplingRate = Annotated[float | None, typer.Option(help="poisson: probability that a client takes part in a round, in (0, 1].")]
CohortSize = Annotated[int | None, typer.Option(help="fixed-size, round-robin: number of clients per round.")]
NumClients = Annotated[int | None, typer.Option(help="fixed-size, round-robin: number of all clients.")]
Delta = Annotated[float | None, typer.Option(help="Delta of the guarantee; 0 (laplace only) for pure epsilon.")]
RelationOption = Annotated[
    str | None,
    typer.Option(
        click_type=click.Choice(RELATIONS),
        help="Neighboring relation of data sets. Default: add-or-remove-one; with fixed-size replace-one.",
    ),
]
RunTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="[PRESET | TASK | METHOD | APP_DIR]",
        help=(
            "Compute for the run of this preset, task or app, or of this method with its default settings. "
            "Default: for the releases that the options describe."
        ),
    ),
]
BestOf = Annotated[
    float | None,
    typer.Option(
        metavar="MEAN",
        help="Also give the epsilon of the best of K such runs, against those who see that run alone; K is secret, and random "
        "with this mean.",
    ),
]
BestOfShape = Annotated[
    float,
    typer.Option(help="Shape of the law of K: 0 logarithmic, 1 geometric, others truncated negative binomial, inf Poisson."),
]


def epsilon(
    target: RunTarget = None,
    *,
    setting: Settings = None,
    noise_multiplier: NoiseMultiplier = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "full",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: Annotated[int, typer.Option(help="Number of releases, one per round.")] = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    best_of_mean: BestOf = None,
    best_of_shape: BestOfShape = 1.0,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon of a whole run, as its statement will give it, or of the releases that the options describe."""
    number = _number_of_runs(best_of_mean, best_of_shape)
    if _is_run(target, {"target", "setting", "as_json", "best_of_mean", "best_of_shape"}):
        _answer_of_run(target, setting or [], None, as_json=as_json, number=number)
        return
    if noise_multiplier is None:
        refuse("--noise-multiplier: is missing; give it, or name a preset, a task, a method or the folder of an app")
    _answer(number)


def calibrate(
    target: RunTarget = None,
    *,
    setting: Settings = None,
    epsilon: Annotated[float | None, typer.Option(help="The largest epsilon allowed.")] = None,
    noise_multiplier: NoiseMultiplier = None,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "full",
    sampling_rate: SamplingRate = None,
    cohort_size: CohortSize = None,
    num_clients: NumClients = None,
    num_rounds: Annotated[int | None, typer.Option(help="Number of releases, one per round.")] = None,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the smallest noise multiplier for an epsilon, of a run as its statement gives it, or of the options' releases.

    With --noise-multiplier, compute the largest number of releases instead.
    """
    if epsilon is None:
        refuse("--epsilon: is missing")
    if _is_run(target, {"target", "setting", "epsilon", "as_json"}):
        _answer_of_run(target, setting or [], epsilon, as_json=as_json)
        return
    if (noise_multiplier is None) == (num_rounds is None):
        both = "both missing" if num_rounds is None else "both given"
        refuse(f"--noise-multiplier and --num-rounds are {both}: give one, the other is computed")
    _answer()


def _number_of_runs(best_of_mean: float | None, shape: float) -> "RunCountLaw | None":
    """Return the law of K, the number of runs among which one is chosen; None for a single run."""
    if best_of_mean is None:
        if "best_of_shape" in given_options():
            refuse("--best-of-shape: needs --best-of-mean")
        return None
    from flower_dp.privacy.selection import number_of_runs

    try:
        return number_of_runs(best_of_mean, shape)
    except ValueError as error:
        refuse(f"--best-of-mean: {error}")


def _answer(number: "RunCountLaw | None" = None) -> None:
    """Compute epsilon, noise multiplier or number of rounds, whichever the options leave open; show the whole cost."""
    from flower_dp.privacy import planned_run
    from flower_dp.privacy.statement import delta_warning

    params = click.get_current_context().params
    options = {name: value for name, value in params.items() if name not in _NOT_OF_RELEASES}
    with refusing():
        cost = planned_run.solve(**options) if number is None else planned_run.best_of(number=number, **options)
    _show(cost, as_json=params["as_json"])
    if clients := options["num_clients"] or (math.ceil(1 / cost["delta"]) if cost["delta"] >= _LARGE_DELTA else 0):
        _warn(delta_warning(cost["delta"], clients, "client"))


def _warn(lines: "Iterable[str]") -> None:
    for line in lines:
        typer.echo(f"warning: {line}", err=True)


def _show(cost: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(cost, allow_nan=False))
        return
    lines = {_LABELS.get(key, key): cost[key] for key in _SHOWN if key in cost}
    width = max(16, *map(len, lines))
    for label, number in lines.items():
        value = "infinite: not private" if number is None else number
        # Round up: a smaller epsilon, delta or noise multiplier would claim more than was computed.
        typer.echo(f"{label:<{width}}  {format_rounded_up(value, 6) if isinstance(value, float) else value}")


# Of a run


def _is_run(target: str | None, fit: set[str]) -> bool:
    """Return whether the command names a run. If it does, refuse options that describe releases."""
    options = given_options()
    if target is None:
        if "setting" in options:
            refuse("--set: needs a preset, a task, a method or an app; name one")
        return False
    if other := sorted(option for name, option in options.items() if name not in fit):
        refuse(f"{other[0]}: can't be combined with {target}; change its settings with --set, such as --set num-rounds=50")
    return True


def _answer_of_run(
    target: str | None, settings: list[str], epsilon: float | None, *, as_json: bool, number: "RunCountLaw | None" = None
) -> None:
    """Show the numbers of a run's statement. With `epsilon`, calibrate the run's noise for it first."""
    from flower_dp.privacy import planned_run
    from flower_dp.privacy.statement import delta_warnings
    from flower_dp.running import apps, plugins

    chosen: dict[str, Any] = {}
    with refusing():
        app = apps.own_app()
        if f"{target}.epsilon" in app.defaults:
            target, settings = None, [f"method={target}", *settings]
        run = apps.resolve(target, settings)
        if epsilon is not None:
            method = run.config.get("method")
            if run.overrides.get(key := f"{method}.calibration") == "paper":
                refuse(f"--epsilon={epsilon:g}: must be the epsilon of the run, and with {key}=paper it is not; set {key}=exact")
            run = apps.resolve(target, [*settings, f"{method}.epsilon={epsilon}"])
        statement = plugins.statement_of(run)
        if number is not None:
            event, _ = plugins.event_against_outsiders(run)
            chosen = planned_run.choice([event], number, delta=statement.delta, relation=statement.relation)
    if not statement.num_charged_rounds:
        refuse("target-epsilon: the first round alone would exceed it, so no round can run; raise it or add noise")
    _show(
        {
            "method": statement.method,
            "num_rounds": statement.num_charged_rounds,
            **{key: value for key, value in statement.noise.items() if key.endswith("noise_multiplier")},
            "epsilon": finite_or_none(statement.epsilon),
            "private": statement.private,
            "delta": statement.delta,
            "relation": statement.relation,
            "accountant": statement.accountant,
            **{
                f"against {adversary.name}": finite_or_none(adversary.epsilon)
                for adversary in statement.adversaries
                if adversary.name in _ADVERSARIES
            },
            **chosen,
        },
        as_json=as_json,
    )
    _warn(delta_warnings(statement.assumptions))
