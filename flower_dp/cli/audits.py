"""Command flower-dp audit: lower bounds on the epsilon of methods and runs."""

import json
import logging
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flower_dp.cli.options import AsJson, Settings, refuse, refusing
from flower_dp.core import checks
from flower_dp.core.formatting import format_audit_limit

if TYPE_CHECKING:
    from flower_dp.audit import Audit, Case
    from flower_dp.audit.one_run import OneRunAudit

# Trials after which the remaining time is estimated.
_TIMED_TRIALS = 20
_COLUMNS = ("case", "delta", "claimed", "audited", "ratio", "false positives", "false negatives", "by")


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[METHOD | CASE | PRESET]",
            help="Audit all cases of a method, one case, or the mechanism of a preset in one round.",
        ),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Audit all cases of all methods.")] = False,
    setting: Settings = None,
    trials: Annotated[int, typer.Option(min=20, help="Number of runs without the unit, and of runs with it, per case.")] = 2000,
    canaries: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Run a one-run audit instead: run the preset or task once, with N canaries among its clients or records.",
        ),
    ] = None,
    canary_seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the canaries and their coins, never of the noise.")
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            help="Confidence of each lower bound, in (0, 1); a correct method is flagged with probability 1 - confidence at most."
        ),
    ] = 0.999,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw false negatives over false positives, with the claimed trade-off curve."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a lower bound on epsilon: run a method many times with and without one unit.

    Every run uses the real clients, messages and server, with fresh noise. The unit is the worst case.

    Exit status: 0; 1 if an audit refutes a claim; 2 with a line that names the invalid case or option.
    """
    if canaries is None and canary_seed is not None:
        refuse("--canary-seed: needs --canaries")
    if canaries is not None:
        if every or plot is not None:
            refuse(f"{'--all' if every else '--plot'}: can't be combined with --canaries")
        one_run = _audited_run(target, setting or [], canaries, canary_seed, confidence)
        typer.echo(json.dumps(one_run.to_dict(), allow_nan=False) if as_json else text_of_run(one_run))
        raise typer.Exit(int(one_run.refuted))
    if (target is None) != every:
        refuse(f"--all: can't be combined with {target}" if every else "--all: is missing; or name a method, a case or a preset")
    with refusing():
        checks.number("--confidence", confidence, above=0, below=1)
        if plot is not None:
            from flower_dp.reporting import canvas

            canvas.file(plot, "--plot")
        cases = _cases(target, setting or [])
    audits = []
    for result in _audited(cases, trials, confidence):
        audits.append(result)
        if as_json:
            typer.echo(json.dumps(_table(result), allow_nan=False))
    if not as_json:
        typer.echo(_text(audits))
    if plot is not None:
        from flower_dp.audit.figure import figure
        from flower_dp.reporting import canvas

        canvas.save(figure(audits), plot, "--plot")
        typer.echo(f"figure: {plot}", err=as_json)
    if any(result.violation for result in audits):
        raise typer.Exit(1)


def _cases(target: str | None, settings: list[str]) -> "list[Case]":
    """Return the cases of a target; without a target, those of all methods.

    Raises:
        ValueError: if the target is unknown, or a preset without privacy.
    """
    from flower_dp.audit import CASES
    from flower_dp.audit.methods import case_of
    from flower_dp.running import apps

    cases = [case for case in CASES.values() if target in (None, case.method, case.label)]
    if cases:
        if settings:
            raise ValueError("--set: needs a preset; the settings of a case are fixed")
        return cases
    try:
        run = apps.resolve(target, settings)
    except ValueError as error:
        if settings:
            raise
        raise ValueError(f"{target}: is not a method that has cases, nor a case; {error}") from error
    return [case_of(run.name, {**run.app.settings(), **run.overrides})]


def _audited(cases: "list[Case]", trials: int, confidence: float) -> "Iterator[Audit]":
    """Yield every case's audit, and show progress: a bar, or lines if standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from flower_dp.audit import audit as audit_of
    from flower_dp.running.progress import clock

    console = Console(stderr=True)
    total, started, ended = trials * len(cases), time.monotonic(), 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for case in cases:
            progress.update(task, description=case.label)

            def done(number: int, before: int = ended, label: str = case.label) -> None:
                num_done = before + number
                progress.update(task, completed=num_done)
                if number == _TIMED_TRIALS and not console.is_terminal:
                    left = (time.monotonic() - started) / num_done * (total - num_done)
                    typer.echo(f"{label}: {trials} trials; all cases in about {clock(left)}", err=True)

            with refusing():
                yield audit_of(case, trials=trials, confidence=confidence, progress=done)
            ended += trials


def _table(result: "Audit") -> dict[str, Any]:
    return {
        "case": result.label,
        "unit": result.claim.unit,
        "relation": result.claim.relation,
        "delta": result.claim.delta,
        "claimed": result.claim.epsilon,
        "audited": result.lower,
        "largest": result.largest,
        "ratio": result.ratio if result.claim.epsilon else None,
        "violation": result.violation,
        "estimator": result.estimator.name,
        "statistic": result.errors.statistic,
        "confidence": result.confidence,
        "trials": result.trials,
        "tested": result.errors.trials,
        "false_positives": result.errors.false_positives,
        "false_negatives": result.errors.false_negatives,
        "seconds": round(result.seconds, 2),
    }


def _text(audits: "list[Audit]") -> str:
    rows = [_COLUMNS, *map(_row, audits)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    first = audits[0]
    lines.append(
        f"{first.trials} runs without the unit and {first.trials} with it; each bound with confidence {first.confidence:g}"
    )
    for result in audits:
        if result.violation:
            lines.append(
                f"VIOLATION: {result.label}: claims epsilon {result.claim.epsilon:.4g}, and it is at least {result.lower:.4g}"
            )
    for result in audits:
        if not result.could_refute:
            lines.append(f"TOO FEW TRIALS: {result.label}: {format_audit_limit(result.claim.epsilon, result.largest)}")
    return "\n".join(lines)


def _row(result: "Audit") -> tuple[str, ...]:
    errors = result.errors
    return (
        result.label,
        f"{result.claim.delta:g}",
        f"{result.claim.epsilon:.3f}",
        f"{result.lower:.3f}",
        f"{result.ratio:.0%}",
        f"{errors.false_positives} of {errors.trials}",
        f"{errors.false_negatives} of {errors.trials}",
        f"{result.estimator.name}, {errors.statistic}",
    )


# A run with canaries among its clients or records


def _audited_run(target: str | None, settings: list[str], canaries: int, seed: int | None, confidence: float) -> "OneRunAudit":
    """Run a preset, a task, or flower-dp's own app with its defaults once, with canaries."""
    from flower_dp.audit.case import quiet
    from flower_dp.audit.one_run_audit import audit_run
    from flower_dp.running import apps

    with refusing():
        checks.integer("--canaries", canaries, at_least=2)
        run = apps.resolve(target, settings)
        if not run.app.own:
            raise ValueError(f"--canaries: needs one of flower-dp's own presets or tasks, not {target}")
        with quiet(logging.ERROR):  # else every absent canary logs that it declines
            return audit_run(run.config, num_canaries=canaries, confidence=confidence, seed=seed)


def text_of_run(audit: "OneRunAudit") -> str:
    """Return the result as lines of text."""
    claimed = f"{audit.claimed:.4g}" if audit.to_dict()["claimed"] is not None else "infinite: not private"
    lines = {
        "claimed epsilon": f"{claimed} at delta {audit.delta:.3g}, for each {audit.unit} ({audit.relation})",
        "lower bound": f"{audit.lower_bound:.4g} with confidence {audit.confidence:g}",
        "guesses": f"{audit.num_correct} of {audit.num_guesses} right, about {audit.num_canaries} canaries",
        "the auditor sees": audit.sees,
    }
    width = max(map(len, lines))
    shown = [f"{label:<{width}}  {value}" for label, value in lines.items()]
    if audit.refuted:
        shown.append(f"VIOLATION: the run claims epsilon {audit.claimed:.4g}, and it is at least {audit.lower_bound:.4g}")
    if math.isfinite(audit.claimed) and not audit.could_refute:
        shown.append(f"TOO FEW CANARIES: {format_audit_limit(audit.claimed, audit.largest)}")
    return "\n".join(shown)
