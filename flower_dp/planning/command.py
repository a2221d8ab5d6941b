"""The command `flower-dp plan`: read a problem, plan, and write the answer. It needs no command-line library."""

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flower_dp.methods import METHODS
from flower_dp.planning.planner import Plan, Planner, ProblemError, read_problem


def run(
    method: str,
    problem: Path | str | None = None,
    *,
    estimates: Mapping[str, object] | None = None,
    as_json: bool = False,
    plot: Path | str | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Plan, write the answer to `out`, and return the exit status.

    Args:
        method: name of a method with a planner.
        problem: TOML file of the problem; None if `estimates` has all keys.
        estimates: keys from `constants.estimate`, which the file need not give; the file's values take precedence.
        as_json: whether the answer is JSON; else it is text.
        plot: PNG file for the bound around the optimum; None for no file.
        out: stream for the answer, by default standard output.
        err: stream for errors, by default standard error.

    Returns:
        0; or 2 with one line on `err` that names the invalid key. If no point is feasible under the bound, the status is 2 too,
        and the answer is written with its reasons.
    """
    out, err = out or sys.stdout, err or sys.stderr
    try:
        planner = planner_of(method)
        if problem is None and estimates is None:
            raise ProblemError("problem", "problem: missing; give --problem FILE.toml, or --estimate-from PRESET")
        answer = planner.plan({**(estimates or {}), **(read_problem(problem) if problem is not None else {})})
        if plot is not None:
            _draw(answer, Path(plot))
    except ProblemError as error:
        err.write(f"{error}\n")
        return 2
    content = answer.to_dict()
    text = "\n".join([*answer.lines(), "", "Why", *(f"  - {reason}" for reason in answer.reasons)]) + "\n"
    if estimates is not None:
        from flower_dp.planning.constants import NOT_PRIVATE  # noqa: PLC0415 - scipy.optimize takes a while to import

        content["warning"] = NOT_PRIVATE
        text += f"\nWarning: {NOT_PRIVATE}\n"
    out.write(json.dumps(content, indent=2, allow_nan=False) + "\n" if as_json else text)
    if answer.infeasible is not None:
        err.write(f"{answer.infeasible}\n")
        return 2
    return 0


def planner_of(method: str) -> Planner:
    """Return a method's planner.

    Raises:
        ProblemError: if the method has no planner.
    """
    if method not in METHODS or not METHODS[method].planner:
        planned = [name for name, entry in METHODS.items() if entry.planner]
        close = difflib.get_close_matches(method, planned, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(planned)}"
        raise ProblemError("method", f"method={method!r}: has no planner; {hint}")
    planner: Planner = METHODS[method].load("planner")
    return planner


def _draw(plan: Plan[Any, Any], path: Path) -> None:
    from flower_dp.planning.plot import figure  # noqa: PLC0415 - matplotlib takes a second to import

    if path.suffix.lower() != ".png":
        raise ProblemError("plot", f"plot={str(path)!r}: must end in .png")
    try:
        figure(plan).savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ProblemError("plot", f"plot={str(path)!r}: can't be written: {error.strerror or error}") from error
