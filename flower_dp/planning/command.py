"""What `flower-dp plan` does: read a problem, plan, write the answer. Without a command-line library."""

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from flower_dp.planning import fedsgd_dpc, fedsgd_dpc_bound, nbafl, nbafl_bound
from flower_dp.planning.problem import ProblemError, read_problem

Plan = fedsgd_dpc.Plan | nbafl.Plan

METHODS: dict[str, Callable[[Mapping[str, object]], Plan]] = {
    fedsgd_dpc_bound.METHOD: fedsgd_dpc.plan,
    nbafl_bound.METHOD: nbafl.plan,
}


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
    """Plan and write the answer to `out` (standard output); return the exit status.

    `problem` is a TOML file; `estimates` are keys that the file does not have to give, from `constants.estimate` (the
    file's values win). With `plot` the bound around the optimum is drawn into that PNG file.

    Returns:
        0, or 2 with one line on `err` (standard error) that names the key at fault. Where the bound was asked for and
        says nothing anywhere, the answer with its reasons is written all the same, and the status is 2.
    """
    out, err = out or sys.stdout, err or sys.stderr
    try:
        answer = make_plan(method, problem, estimates=estimates)
        if plot is not None:
            _draw(answer, Path(plot))
    except ProblemError as error:
        err.write(f"{error}\n")
        return 2
    content, text = answer.to_dict(), to_text(answer)
    if estimates is not None:
        from flower_dp.planning.constants import NOT_PRIVATE  # noqa: PLC0415 - scipy.optimize takes a while to import

        content["warning"] = NOT_PRIVATE
        text += f"\nWarning: {NOT_PRIVATE}\n"
    out.write(json.dumps(content, indent=2, allow_nan=False) + "\n" if as_json else text)
    if not answer.feasible:
        err.write(f"{_nothing_feasible(answer)}\n")
        return 2
    return 0


def make_plan(method: str, problem: Path | str | None = None, *, estimates: Mapping[str, object] | None = None) -> Plan:
    """Return the plan for a problem file, completed by estimates.

    Raises:
        ProblemError: naming the method, the file or the key that is missing, unknown or impossible.
    """
    if method not in METHODS:
        close = difflib.get_close_matches(method, METHODS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(METHODS)}"
        raise ProblemError("method", f"method={method!r}: has no planner; {hint}")
    if problem is None and estimates is None:
        raise ProblemError("problem", "problem: missing; give a TOML file")
    given = read_problem(problem) if problem is not None else {}
    return METHODS[method]({**(estimates or {}), **given})


def to_text(plan: Plan) -> str:
    """Return the answer for a reader: the numbers, what was compared, and why."""
    lines = _fedsgd_lines(plan) if isinstance(plan, fedsgd_dpc.Plan) else _nbafl_lines(plan)
    lines += ["", "Why", *(f"  - {reason}" for reason in plan.reasons)]
    return "\n".join(lines) + "\n"


def _fedsgd_lines(plan: fedsgd_dpc.Plan) -> list[str]:
    problem, best = plan.problem, plan.best
    replies = fedsgd_dpc.num_replies(problem.num_clients, best.cohort_size, best.num_rounds)
    lines = [
        f"{fedsgd_dpc_bound.METHOD}, {problem.mechanism} mechanism, {problem.num_clients} clients",
        "",
        f"  num_rounds   {best.num_rounds}",
        f"  cohort_size  {best.cohort_size}",
        f"  bound        {best.bound:.6g}  (expected squared distance to the optimum)",
        f"  num_replies  {replies}  (at most, of each client)",
        "",
        "Compared",
    ]
    width = max(len(candidate.name) for candidate in plan.candidates)
    for candidate in plan.candidates:
        line = f"  {candidate.name:<{width}}  b={candidate.cohort_size} T={candidate.num_rounds} bound {candidate.bound:.6g}"
        if candidate.continuous_bound is not None:
            where = f"b={candidate.continuous_cohort_size:.6g} T={candidate.continuous_num_rounds:.6g}"
            line += f"  (continuous: {where} bound {candidate.continuous_bound:.6g})"
        lines.append(line)
    return lines


def _nbafl_lines(plan: nbafl.Plan) -> list[str]:
    problem = plan.problem
    lines = [
        f"{nbafl_bound.METHOD}, {problem.cohort_size} of {problem.num_clients} clients, {problem.num_rounds} rounds",
        "",
        f"  uplink_noise_std    {plan.uplink_noise_std:.6g}",
        f"  downlink_noise_std  {plan.downlink_noise_std:.6g}",
    ]
    for name, point in (("best_num_rounds", plan.best_num_rounds), ("best_cohort_size", plan.best_cohort_size)):
        if point is None:
            continue
        where = point.num_rounds if name == "best_num_rounds" else point.cohort_size
        answer = "infeasible" if point.bound is None else f"{where}  (bound {point.bound:.6g})"
        lines.append(f"  {name:<18}  {answer}")
    if plan.candidates:
        lines += ["", "Compared"]
    for point in plan.candidates:
        until = f"..{point.last_cohort_size}" if point.last_cohort_size not in {None, point.cohort_size} else ""
        value = f"infeasible: {point.reason}" if point.bound is None else f"bound {point.bound:.6g}"
        lines.append(f"  {point.name:<23}  K={point.cohort_size}{until} T={point.num_rounds}  {value}")
    return lines


def _nothing_feasible(plan: Plan) -> str:
    reasons = [
        f"{key}: {point.reason}"
        for key, point in (
            ("num_rounds", getattr(plan, "best_num_rounds", None)),
            ("cohort_size", getattr(plan, "best_cohort_size", None)),
        )
        if point is not None
    ]
    return "nothing is feasible: " + "; ".join(reasons)


def _draw(plan: Plan, path: Path) -> None:
    from flower_dp.planning.plot import draw  # noqa: PLC0415 - matplotlib takes a second to import

    if path.suffix.lower() != ".png":
        raise ProblemError("plot", f"plot={str(path)!r}: must end in .png")
    try:
        draw(plan, path)
    except OSError as error:
        raise ProblemError("plot", f"plot={str(path)!r}: can't be written: {error.strerror or error}") from error
