"""Tables of a comparison, as text, JSON, CSV, LaTeX or Markdown."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from flower_dp.core.formatting import finite_or_none, format_delta, format_epsilon, format_rounded_up
from flower_dp.reporting.compare import Curve
from flower_dp.reporting.labels import find, wrapped

# Columns of the guarantee behind an epsilon, and those of them that are texts; the others are numbers, flush right.
_GUARANTEE = ("delta", "protects", "against")
_TEXTS = ("protects", "against")
_LARGE = 1e5  # epsilons from here on are too wide for a column
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: "\\" + sign for sign in "&%$#_{}"
}


def text(curves: Sequence[Curve], metric: str, notes: Sequence[str] = (), *, pivot: bool = False) -> str:
    """Return a table of the curves' last points as text."""
    heads, rows = _table(curves, metric, " +- ", pivot=pivot)
    lines = [heads]
    for row in rows:
        parts = [wrapped(cell) if is_text else [cell] for cell, is_text in zip(row, _are_texts(heads), strict=True)]
        lines += [list(line) for line in zip_longest(*parts, fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if is_text else str.rjust for is_text in _are_texts(heads)]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip() for line in lines
    )


def as_json(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return the table as JSON, with the settings that differ and the folders; null: not finite, not private or unknown."""
    return json.dumps({"metric": metric, "curves": [_record(curve) for curve in curves], "notes": list(notes)}, indent=2)


def as_csv(curves: Sequence[Curve], metric: str, notes: Sequence[str] = ()) -> str:
    """Return the table as CSV, one line per curve and one column per setting that differs."""
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


def as_latex(curves: Sequence[Curve], metric: str, notes: Sequence[str] = (), *, pivot: bool = False) -> str:
    """Return the table as a LaTeX `tabular` for the package booktabs."""
    heads, rows = _table(curves, metric, " +- ", pivot=pivot)
    # The adversary is a whole sentence, so its column wraps.
    sides = ["p{5cm}" if head == "against" else "rl"[text] for head, text in zip(heads, _are_texts(heads), strict=True)]
    first, *body = [" & ".join(map(_escaped, line)) + r" \\" for line in (heads, *rows)]
    lines = [rf"\begin{{tabular}}{{{''.join(sides)}}}", r"\toprule", first, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([r"% needs \usepackage{booktabs}", *(f"% note: {note}" for note in notes), *lines])


def as_markdown(curves: Sequence[Curve], metric: str, notes: Sequence[str] = (), *, pivot: bool = False) -> str:
    """Return the table as Markdown, with the notes below it."""
    heads, rows = _table(curves, metric, " ± ", pivot=pivot)
    rule = "|".join("---" if is_text else "---:" for is_text in _are_texts(heads))
    lines = ["| " + " | ".join(cell.strip().replace("|", r"\|") for cell in line) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:], *(f"\n{note}" for note in notes)])


def is_pivot(curves: Sequence[Curve]) -> bool:
    """Return whether a pivot of the curves has at least two rows and two columns."""
    return len(set(map(_row_key, curves))) > 1 and len({_column(curve) for curve in curves}) > 1


FORMATS: Mapping[str, Callable[[Sequence[Curve], str, Sequence[str]], str]] = {
    "text": text,
    "json": as_json,
    "csv": as_csv,
    "latex": as_latex,
    "markdown": as_markdown,
}
PIVOTS = {"text": partial(text, pivot=True), "latex": partial(as_latex, pivot=True), "markdown": partial(as_markdown, pivot=True)}


def _are_texts(heads: Sequence[str]) -> list[bool]:
    return [at == 0 or head in _TEXTS for at, head in enumerate(heads)]


def _table(curves: Sequence[Curve], metric: str, sign: str, *, pivot: bool) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of a table; all numbers of a column have the same number of decimals."""
    finals = _finals(curves, metric, sign)
    if pivot:
        return _pivot(curves, finals, f"{metric}{_unit(metric)}")
    epsilon = "epsilon" + (" (largest)" if any(len(curve.runs) > 1 for curve in curves) else "")
    heads = ["curve", "seeds", f"final {metric}{_unit(metric)}", epsilon, *_GUARANTEE, "rounds"]
    rows = []
    for curve, final, epsilon in zip(curves, finals, _epsilons(curves), strict=True):
        seeds = _seeds(curve)
        num_seeds = f"{seeds}" if seeds == len(curve.runs) else f"{seeds} ({len(curve.runs)} runs)"
        rows.append([curve.label, num_seeds, final, epsilon, *_guarantee(curve), str(curve.rounds[-1])])
    return heads, rows


def _pivot(curves: Sequence[Curve], finals: Sequence[str], metric: str) -> tuple[list[str], list[list[str]]]:
    """Return one row for curves that differ only in the noise, and one column for each epsilon."""
    columns = sorted({_column(curve) for curve in curves})
    cells: dict[tuple[str, ...], dict[float, list[str]]] = {}
    for curve, final in zip(curves, finals, strict=True):
        cells.setdefault(_row_key(curve), {}).setdefault(_column(curve), []).append(final)
    heads = [f"epsilon <= {at:.10g}" if math.isfinite(at) else "not private" for at in columns]
    rows = [[*key, *("; ".join(row.get(at, ["-"])) for at in columns)] for key, row in cells.items()]
    return [f"final {metric}", *_GUARANTEE, *heads], rows


def _row_key(curve: Curve) -> tuple[str, ...]:
    return (curve.line, *_guarantee(curve))


def _column(curve: Curve) -> float:
    """Return an upper bound on a curve's epsilon: the configured one, if it holds; else the curve's own, rounded up."""
    if not curve.private:
        return math.inf
    config = curve.runs[0].config
    for name in ("epsilon", "target-epsilon"):
        wanted = config.get(find(name, config) or "")
        if isinstance(wanted, int | float) and curve.epsilon <= wanted:
            return float(wanted)
    return float(format_rounded_up(curve.epsilon, 4))


def _record(curve: Curve) -> dict[str, Any]:
    """Return a curve as names and values, with all digits of its numbers."""
    first, private = curve.runs[0], curve.private
    return {
        "curve": curve.label,
        "mean": finite_or_none(curve.mean[-1]),
        "std": finite_or_none(curve.std[-1]) if len(curve.runs) > 1 else None,
        "round": int(curve.rounds[-1]),
        "seeds": _seeds(curve),
        "private": private,
        "largest_epsilon": finite_or_none(curve.epsilon),
        "delta": first.delta if private else None,
        "protects": first.unit if private else None,
        "against": first.protected_against if private else None,
        "runs": [str(run.folder) for run in curve.runs],
        "settings": dict(curve.differ),
    }


def _seeds(curve: Curve) -> int:
    return len({run.config.get("seed") for run in curve.runs})


def _unit(metric: str) -> str:
    return " (%)" if metric == "accuracy" else ""


def _guarantee(curve: Curve) -> list[str]:
    """Return the delta, the unit and relation, and the adversary of a curve's epsilon."""
    first, delta = curve.runs[0], curve.runs[0].delta
    if not curve.private:
        return ["-"] * len(_GUARANTEE)
    return [format_delta(delta) if isinstance(delta, int | float) else "-", first.unit, first.protected_against]


def _epsilons(curves: Sequence[Curve]) -> list[str]:
    """Return the epsilons of a column, rounded up to four digits of the largest; very large ones have four digits each."""
    known = [curve.epsilon for curve in curves if curve.private and curve.epsilon < _LARGE]
    decimals = _decimals(known)
    return [
        format_epsilon(curve.epsilon, decimals=decimals) if curve.private and curve.epsilon < _LARGE else curve.format_epsilon()
        for curve in curves
    ]


def _finals(curves: Sequence[Curve], metric: str, sign: str) -> list[str]:
    """Return mean and standard deviation of the last values, with equal decimals; spaces stand for a missing deviation."""
    scale = 100 if metric == "accuracy" else 1
    pairs = [(scale * float(curve.mean[-1]), scale * float(curve.std[-1]) if len(curve.runs) > 1 else None) for curve in curves]
    decimals = _decimals([abs(mean) for mean, _ in pairs if math.isfinite(mean)])
    spreads = ["" if std is None else f"{sign}{std:.{decimals}f}" for _, std in pairs]
    width = max(map(len, spreads), default=0)
    return [
        f"{mean:.{decimals}f}{spread:<{width}}" if math.isfinite(mean) else "not finite"
        for (mean, _), spread in zip(pairs, spreads, strict=True)
    ]


def _decimals(numbers: Sequence[float]) -> int:
    """Return the decimals with which the largest number has four digits."""
    largest = max(numbers, default=0.0)
    return min(max(3 - math.floor(math.log10(largest)), 0), 10) if largest > 0 else 1


def _escaped(text: str) -> str:
    """Return plain text as LaTeX; spaces at the text's end become a phantom that keeps a column's digits aligned."""
    plain = "".join(_LATEX.get(sign, sign) for sign in text.rstrip()).replace(" +- ", r" $\pm$ ").replace("<=", r"$\leq$")
    room = len(text) - len(text.rstrip()) - len(" +- ")
    return plain + (rf"\phantom{{ $\pm$ {'0' * (room - 1)}.}}" if room > 2 else "")
