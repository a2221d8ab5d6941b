"""The epsilon of given noise, and the noise for a given epsilon, of a run or of releases: flower-dp epsilon | calibrate."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from flower_dp.cli.options import AsJson, Settings, given, refuse, refusing
from flower_dp.core.formatting import finite_or_none, format_rounded_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flower_dp.privacy.selection import RunCountLaw

# In the order of a statement.
_ADVERSARIES = ("outsiders", "participants", "the server")
_NOT_OF_RELEASES = ("target", "setting", "as_json", "best_of_mean", "best_of_shape")
# Where the number of clients isn't known: of fewer than a hundred clients nobody expects privacy at such a delta.
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
        help="How the clients of a round are chosen; full: all take part.",
    ),
]
SamplingRate = Annotated[
    float | None, typer.Option(help="poisson: the probability with which each client takes part in a round.")
]
CohortSize = Annotated[int | None, typer.Option(help="fixed-size, round-robin: clients in a round.")]
NumClients = Annotated[int | None, typer.Option(help="fixed-size, round-robin: clients in all.")]
Delta = Annotated[float | None, typer.Option(help="Delta of the guarantee; 0 (laplace only) for pure epsilon.")]
RelationOption = Annotated[
    str | None,
    typer.Option(
        click_type=click.Choice(RELATIONS),
        help="Which data sets are neighbors. Default: add-or-remove-one; with fixed-size replace-one.",
    ),
]
RunTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="[PRESET | TASK | METHOD | APP_DIR]",
        help=(
            "A run of this preset, task or app, or of this method with its defaults, with all settings. "
            "Default: the options' releases."
        ),
    ),
]
BestOf = Annotated[
    float | None,
    typer.Option(
        metavar="MEAN",
        help="Also of the best of K such runs, K random with this mean and secret, against those who see that run alone.",
    ),
]
BestOfShape = Annotated[
    float, typer.Option(help="Of K: 0 logarithmic, 1 geometric, others truncated negative binomial, inf Poisson.")
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
    num_rounds: Annotated[int, typer.Option(help="Releases in all, one a round.")] = 1,
    delta: Delta = None,
    relation: RelationOption = None,
    best_of_mean: BestOf = None,
    best_of_shape: BestOfShape = 1.0,
    as_json: AsJson = False,
) -> None:
    """Compute the epsilon of a whole run: the one that the statement of the run will give, or that of the options' releases."""
    number = _number_of_runs(best_of_mean, best_of_shape)
    if _is_run(target, {"target", "setting", "as_json", "best_of_mean", "best_of_shape"}):
        _answer_of_run(target, setting or [], None, as_json=as_json, number=number)
        return
    if noise_multiplier is None:
        refuse("--noise-multiplier is missing; or name a preset, a task, a method or the folder of an app")
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
    num_rounds: Annotated[int | None, typer.Option(help="Releases in all, one a round.")] = None,
    delta: Delta = None,
    relation: RelationOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the least noise multiplier for an epsilon: of a run, as its statement will give it, or of the options' releases.

    With --noise-multiplier it computes the most releases instead.
    """
    if epsilon is None:
        refuse("--epsilon is missing")
    if _is_run(target, {"target", "setting", "epsilon", "as_json"}):
        _answer_of_run(target, setting or [], epsilon, as_json=as_json)
        return
    if (noise_multiplier is None) == (num_rounds is None):
        both = "both missing" if num_rounds is None else "both given"
        refuse(f"--noise-multiplier and --num-rounds are {both}: give one, the other is computed")
    _answer()


def _number_of_runs(best_of_mean: float | None, shape: float) -> "RunCountLaw | None":
    """Return the law of the number of runs among which one is chosen; None for a single run."""
    if best_of_mean is None:
        if "best_of_shape" in given():
            refuse("--best-of-mean is missing; --best-of-shape belongs to it")
        return None
    from flower_dp.privacy.selection import number_of_runs

    try:
        return number_of_runs(best_of_mean, shape)
    except ValueError as error:
        refuse(f"--best-of-mean: {error}")


def _answer(number: "RunCountLaw | None" = None) -> None:
    """Compute what the options leave open (epsilon, noise multiplier or number of rounds), and show the whole cost."""
    from flower_dp.privacy import planned_run
    from flower_dp.privacy.statement import delta_warning

    params = click.get_current_context().params
    options = {name: value for name, value in params.items() if name not in _NOT_OF_RELEASES}
    with refusing():
        cost = planned_run.solve(**options) if number is None else planned_run.best_of(number=number, **options)
    _show(cost, as_json=params["as_json"])
    # Without a number of clients: nobody has so few of them that such a delta is small.
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
        # Up: less of an epsilon, a delta or a noise multiplier would not be what was computed.
        typer.echo(f"{label:<{width}}  {format_rounded_up(value, 6) if isinstance(value, float) else value}")


# Of a run


def _is_run(target: str | None, fit: set[str]) -> bool:
    """Return whether a run is asked for, and refuse options that describe releases then."""
    options = given()
    if target is None:
        if "setting" in options:
            refuse("--set belongs to a preset, a task, a method or an app, which is missing")
        return False
    if other := sorted(option for name, option in options.items() if name not in fit):
        refuse(f"{other[0]}: {target} has settings of its own; change them with --set, as --set num-rounds=50")
    return True


def _answer_of_run(
    target: str | None, settings: list[str], epsilon: float | None, *, as_json: bool, number: "RunCountLaw | None" = None
) -> None:
    """Show what a run's statement will say; with `epsilon`, of the run whose noise is made for it."""
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
                refuse(f"--epsilon={epsilon:g}: with {key}=paper it is no budget of the run; set {key}=exact")
            run = apps.resolve(target, [*settings, f"{method}.epsilon={epsilon}"])
        statement = plugins.statement_of(run)
        if number is not None:
            event, _ = plugins.event_against_outsiders(run)
            chosen = planned_run.choice([event], number, delta=statement.delta, relation=statement.relation)
    if not statement.num_charged_rounds:
        refuse("no round can be run: the first one alone would pass the target")
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
            **{f"against {one.name}": finite_or_none(one.epsilon) for one in statement.adversaries if one.name in _ADVERSARIES},
            **chosen,
        },
        as_json=as_json,
    )
    _warn(delta_warnings(statement.assumptions))
