"""Command flower-dp plan: the best configuration under a paper's convergence bound."""

import io
import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flower_dp.cli.options import AsJson, Settings, fail

if TYPE_CHECKING:
    from flower_dp.planning.planner import Inputs
    from flower_dp.running.apps import Target


def plan(
    method: Annotated[str, typer.Argument(help="A method that has a planner; see docs/planning.md.")],
    *,
    problem: Annotated[
        str | None, typer.Option(metavar="FILE.toml", help="Read the problem's keys from this file; see docs/planning.md.")
    ] = None,
    estimate_from: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="Take the keys that the problem lacks from a preset's settings and its clients' data: NOT PRIVATE.",
        ),
    ] = None,
    setting: Settings = None,
    l2: Annotated[
        float | None,
        typer.Option(
            help="L2 coefficient of the loss whose constants are estimated, > 0. Default: the preset's weight-decay, or 0.1."
        ),
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw the bound around the optimum.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the best configuration under the convergence bound of a method's paper.

    Exit status: 0, or 2 with a line that names the missing, unknown or invalid key.
    """
    from flower_dp.planning import command

    estimates, origin = None, None
    try:
        if estimate_from is None:
            for name, value in (("--set", setting and setting[0]), ("--l2", l2)):
                if value is not None:
                    raise ValueError(f"{name}={value}: needs --estimate-from")
        else:
            command.planner_of(method)
            estimates, origin = _estimates(method, problem, estimate_from, setting or [], l2)
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()), 2)
    out, err = io.StringIO(), io.StringIO()
    status = command.run(method, problem, estimates=estimates, as_json=as_json, plot=plot, out=out, err=err)
    answer = out.getvalue()
    if answer:
        if origin is not None:
            answer = _named(answer, origin["inputs_from"], setting or [], as_json=as_json)
        typer.echo(_with_origin(answer, origin, as_json), nl=False)
    if status:
        fail(err.getvalue().strip(), status)


def _estimates(
    method: str, problem: str | None, preset: str, settings: list[str], l2: float | None
) -> tuple[dict[str, object], dict[str, Any]]:
    """Return the keys that a pilot estimates on a preset's data, and a description of their origin.

    Raises:
        ValueError: naming the invalid option, setting or key.
    """
    from flower_dp.core import checks
    from flower_dp.planning.planner import read_problem
    from flower_dp.running import apps

    if l2 is not None:
        checks.number("--l2", l2, above=0)
    given = read_problem(problem) if problem is not None else {}
    target = apps.resolve(preset, settings)
    if not target.app.pilot:
        raise ValueError(f"--estimate-from={preset}: has no pilot; name one in its pyproject.toml under [tool.flower-dp]")
    estimates = _pilot(target, method, given, l2)
    inputs = {key: value for key, value in estimates.values.items() if key not in given}
    return inputs, {"inputs_from": target.name, "inputs": inputs, "notes": list(estimates.notes)}


def _pilot(target: "Target", method: str, given: Mapping[str, object], l2: float | None) -> "Inputs":
    """Call the pilot that the app's pyproject.toml names; this package knows only its signature."""
    from flower_dp.running import plugins

    try:
        with plugins.load_plugin(target.app, target.app.pilot) as pilot:
            inputs: Inputs = pilot(method, target.config, given=given, l2=l2)
            return inputs
    except plugins.PluginError as error:
        raise ValueError(f"--estimate-from: {error}") from None


def _named(answer: str, preset: str, settings: list[str], *, as_json: bool) -> str:
    """Return the answer with the preset in its command, and the changed settings that the plan leaves alone."""
    kept = [setting for setting in settings if f" --set {setting.partition('=')[0]}=" not in answer]
    target = " ".join(["flower-dp run", preset, *(f"--set {shlex.quote(setting)}" for setting in kept)])
    written = json.dumps(target)[1:-1] if as_json else target
    return answer.replace("flower-dp run PRESET", written)


def _with_origin(answer: str, origin: Mapping[str, Any] | None, as_json: bool) -> str:
    """Return the answer with the origin of its inputs."""
    if origin is None:
        return answer
    if as_json:
        return json.dumps(json.loads(answer) | origin, indent=2, allow_nan=False) + "\n"
    width = max(map(len, origin["inputs"]), default=0)
    lines = ["", f"Inputs from {origin['inputs_from']}: its settings, and estimates from its clients' data"]
    lines += [f"  {key:<{width}}  {_short(value)}" for key, value in origin["inputs"].items()]
    return answer + "\n".join([*lines, *(f"  - {note}" for note in origin["notes"])]) + "\n"


def _short(value: object) -> str:
    if isinstance(value, list):
        low, high = min(value), max(value)
        return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}, {len(value)} clients"
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
