"""A run with canaries among its clients or records: flower-dp audit PRESET --canaries N."""

import json
import logging
import math
from typing import TYPE_CHECKING

import typer

from flower_dp.cli.errors import refuse
from flower_dp.core.checks import BadValue
from flower_dp.core.words import beyond_in_words

if TYPE_CHECKING:
    from flower_dp.audit.one_run import OneRunAudit


def audit_one_run(
    target: str | None, settings: list[str], *, canaries: int, seed: int | None, confidence: float, as_json: bool
) -> None:
    """Run a preset once with canaries, and show what their coins tell.

    Args:
        target: a preset or a task; None for flower-dp's own app with its defaults.
        settings: `key=value` texts.
        canaries: how many.
        seed: of coins and canaries; None for the operating system's entropy.
        confidence: of the bound.
        as_json: whether to answer with a JSON object.

    Raises:
        Exit: with status 1, if the bound is above the claim.
    """
    from flower_dp.audit.case import quiet
    from flower_dp.audit.one_run_audit import audit_run
    from flower_dp.running import apps

    try:
        run = apps.resolve(target, settings)
        if not run.app.own:
            raise ValueError(f"{target}: --canaries is for flower-dp's own presets and tasks")
        with quiet(logging.ERROR):  # absent canaries decline, a line each
            found = audit_run(run.config, num_canaries=canaries, confidence=confidence, seed=seed)
    except ValueError as error:
        named = isinstance(error, BadValue) and error.field == "num_canaries"
        refuse(f"--canaries{str(error).removeprefix('num_canaries')}" if named else str(error))
    typer.echo(json.dumps(found.to_dict(), allow_nan=False) if as_json else text_of(found))
    if found.refuted:
        raise typer.Exit(1)


def text_of(audit: "OneRunAudit") -> str:
    """Return the result in lines."""
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
        shown.append(f"TOO FEW CANARIES: {beyond_in_words(audit.claimed, audit.largest)}")
    return "\n".join(shown)
