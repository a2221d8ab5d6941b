"""What all figures share: an empty figure, colours, and a PNG file that is written whole or not at all."""

import io
import os
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flower_dp.running.run_folder import write_whole

# Okabe and Ito's colours, which colour-blind readers can distinguish, without the yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":")


def empty(width: float, height: float) -> Figure:
    """Return an empty figure of some inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def look(place: int) -> dict[str, Any]:
    """Return colour and style of the line at a place among many."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS) % len(STYLES)]}


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a PNG file, completely or not at all.

    Raises:
        ValueError: if the file's name does not end in .png, or it can't be written.
    """
    target = png(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    try:
        write_whole(target, buffer.getvalue())
    except OSError as error:
        raise ValueError(f"--output={path}: can't be written: {error.strerror or error}") from None


def png(path: str | os.PathLike[str]) -> Path:
    """Return the path of a PNG file.

    Raises:
        ValueError: if its name does not end in .png.
    """
    target = Path(path).expanduser()
    if target.suffix.lower() != ".png":
        raise ValueError(f"--output={path}: must end in .png")
    return target
