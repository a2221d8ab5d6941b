"""The common parts of all figures: an empty figure, colors, and a file that is written completely or not at all."""

import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flower_dp.running.run_folder import write_whole

# Okabe and Ito's colors, which color-blind readers can distinguish; without yellow, which is hard to see on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":")
_LACKS = re.compile(r"Glyph (\d+) .*missing from", re.DOTALL)  # matplotlib's warning, once for each letter


def empty(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def look(index: int, style: int | None = None) -> dict[str, Any]:
    """Return color and style of the line with an index; `style` is its index among the lines of its color."""
    style = index // len(COLORS) if style is None else style
    return {"color": COLORS[index % len(COLORS)], "linestyle": STYLES[style % len(STYLES)]}


def entry(lines: Sequence[str]) -> str:
    """Return lines as a legend's entry, with a space where matplotlib would drop it: before an underscore, or in an empty one."""
    text = "\n".join(lines)
    return f" {text}" if not text or text.startswith("_") else text


def save(figure: Figure, path: str | os.PathLike[str], option: str = "--output") -> None:
    """Write a figure to a file, completely or not at all; the name's suffix gives the type.

    Letters that the font lacks are boxes in the figure; a line on standard error names them.

    Raises:
        ValueError: if matplotlib can't write this type, or the file can't be written.
    """
    target = file(path, option)
    buffer = io.BytesIO()
    try:
        # Type 42: many journals refuse type 3, matplotlib's default.
        with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}), _lacking_letters_named():
            figure.savefig(buffer, format=target.suffix[1:].lower())
        write_whole(target, buffer.getvalue())
    except (OSError, RuntimeError) as error:  # such as a type that needs another program, as pgf needs LaTeX
        raise ValueError(f"{option}={path}: can't be written: {getattr(error, 'strerror', None) or error}") from None


def file(path: str | os.PathLike[str], option: str = "--output") -> Path:
    """Return the path of a figure's file.

    Raises:
        ValueError: if matplotlib can't write a file of this type.
    """
    target = Path(path).expanduser()
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if target.suffix[1:].lower() not in known:
        raise ValueError(f"{option}={path}: must end in a type that matplotlib writes, such as .pdf, .png or .svg")
    return target


@contextmanager
def _lacking_letters_named() -> Iterator[None]:
    """Replace matplotlib's warnings of letters that the font lacks by one line; let other warnings pass."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always", UserWarning)
        yield
    letters: dict[str, None] = {}
    for warning in recorded:
        if lacks := _LACKS.match(str(warning.message)):
            letters[chr(int(lacks[1]))] = None
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if letters:
        sys.stderr.write(
            f"note: the figure has boxes in place of {' '.join(letters)}, which matplotlib's font lacks; "
            "set font.family in a file matplotlibrc of the current folder to a font that has them\n"
        )
