"""Tables of a comparison: text, JSON, CSV, LaTeX."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flower_dp.core.words import delta_in_words
from flower_dp.reporting.compare import Curve
from flower_dp.reporting.labels import wrapped

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: "\\" + sign for sign in "&%$#_{}"
}


def text(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return a table of the curves' last points: label, seeds, last mean +- standard deviation, epsilon, rounds."""
    heads = ("curve", "seeds", f"final {metric}{_unit(metric)}", _epsilon(curves), "delta", "protects", "rounds")
    lines: list[tuple[str, ...]] = [heads]
    for curve in curves:
        seeds = _seeds(curve)
        many = f"{seeds}" if seeds == len(curve.runs) else f"{seeds} ({len(curve.runs)} runs)"
        first, private = curve.runs[0], curve.private
        unit = first.unit if private else "-"
        cells = (many, _final(curve, metric, " +- "), curve.epsilon_in_words(), _delta(curve), unit, str(curve.rounds[-1]))
        label, *rest = wrapped(curve.label)
        lines += [(label, *cells), *((part, *[""] * len(cells)) for part in rest)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def as_json(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return the table as JSON, with the settings that differ and the folders; null: not finite, not private, not known."""
    return json.dumps({"metric": metric, "curves": [_record(curve) for curve in curves], "notes": list(notes)}, indent=2)


def as_csv(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return the table as CSV, one line a curve; settings that differ have a column each."""
    keys = dict.fromkeys(key for curve in curves for key in curve.differ)
    rows = []
    for curve in curves:
        record = _record(curve)
        settings, runs = record.pop("settings"), record.pop("runs")
        rows.append({"metric": metric, **record, "runs": len(runs)} | {key: settings.get(key) for key in keys})
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().rstrip("\n")


def as_latex(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return the table as a LaTeX `tabular`; it needs the package booktabs."""
    lines = [("", "runs", f"final {metric}{_unit(metric)}", _epsilon(curves), "delta", "rounds")]
    for curve in curves:
        cells = (str(len(curve.runs)), _final(curve, metric, " +- "), curve.epsilon_in_words(), _delta(curve))
        lines.append((curve.label, *cells, str(curve.rounds[-1])))
    heads, *rows = [" & ".join(map(_escaped, line)) + r" \\" for line in lines]
    body = [r"\begin{tabular}{lrrrrr}", r"\toprule", heads, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([r"% needs \usepackage{booktabs}", *(f"% note: {note}" for note in notes), *body])


def as_markdown(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return the table as Markdown, with the notes below it."""
    lines = [("curve", "seeds", f"final {metric}{_unit(metric)}", _epsilon(curves), "delta", "rounds")]
    for curve in curves:
        cells = (str(_seeds(curve)), _final(curve, metric, " ± "), curve.epsilon_in_words(), _delta(curve))
        lines.append((curve.label.replace("|", r"\|"), *cells, str(curve.rounds[-1])))
    heads, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([heads, "|---" * len(lines[0]) + "|", *rows, *(f"\n{note}" for note in notes)])


FORMATS: Mapping[str, Callable[[Sequence[Curve], str, Sequence[str]], str]] = {
    "text": text,
    "json": as_json,
    "csv": as_csv,
    "latex": as_latex,
    "markdown": as_markdown,
}


def _record(curve: Curve) -> dict[str, Any]:
    """Return a curve as names and values, numbers in full."""
    first, private = curve.runs[0], curve.private
    return {
        "curve": curve.label,
        "mean": _finite(curve.mean[-1]),
        "std": _finite(curve.std[-1]) if len(curve.runs) > 1 else None,
        "round": int(curve.rounds[-1]),
        "seeds": _seeds(curve),
        "private": private,
        "largest_epsilon": _finite(curve.epsilon),
        "delta": first.delta if private else None,
        "protects": first.unit if private else None,
        "against": first.adversary if private else None,
        "runs": [str(run.folder) for run in curve.runs],
        "settings": dict(curve.differ),
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _seeds(curve: Curve) -> int:
    return len({run.config.get("seed") for run in curve.runs})


def _unit(metric: str) -> str:
    return " (%)" if metric == "accuracy" else ""


def _epsilon(curves: Sequence[Curve]) -> str:
    """Return the head of the column of epsilons."""
    return "tight epsilon" + (" (largest)" if any(len(curve.runs) > 1 for curve in curves) else "")


def _delta(curve: Curve) -> str:
    delta = curve.runs[0].delta
    return delta_in_words(delta) if curve.private and isinstance(delta, int | float) else "-"


def _final(curve: Curve, metric: str, sign: str) -> str:
    scale = 100 if metric == "accuracy" else 1
    mean, std = scale * curve.mean[-1], scale * curve.std[-1]
    if not math.isfinite(mean):
        return "not finite"
    return f"{mean:.4g}" if len(curve.runs) == 1 else f"{mean:.4g}{sign}{std:.2g}"


def _escaped(text: str) -> str:
    """Return plain text as LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in text).replace(" +- ", r" $\pm$ ")
