"""A run's progress on the screen: a bar in a terminal, a changing line in a notebook, else one line per round."""

import importlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from flower_dp.core import metric_columns
from flower_dp.core.formatting import format_epsilon


class Display:
    """The plain display of a run: one line per round."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._first: tuple[int, float] | None = None
        self._newest: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show one line of `metrics.jsonl`."""
        left = self.seconds_left(metrics, time.monotonic())
        self._newest.update(metrics)
        self._draw(metrics, [f"eta {clock(left)}"] if left else [])

    def seconds_left(self, metrics: Mapping[str, Any], now: float) -> float | None:
        """Return the seconds until the last round, at the mean pace of the lines so far; None before there is a pace."""
        at, last = metrics.get("round"), metrics.get("num-rounds")
        if not isinstance(at, int) or not isinstance(last, int):
            return None
        if self._first is None:
            self._first = (at, now)
        first, then = self._first
        return (now - then) / (at - first) * (last - at) if at > first else None

    def _draw(self, metrics: Mapping[str, Any], left: list[str]) -> None:
        stream = self._stream or sys.stdout
        stream.write("  ".join([round_text(metrics), *quantities(metrics), *left]) + "\n")
        stream.flush()


class Notebook(Display):
    """The display in a notebook: one changing line of a cell, with the newest metrics, epsilon and time left."""

    # Not a bar of rich: its widget clears the cell's results if a notebook runs without a browser (nbconvert).

    _line: Any = None

    def _draw(self, metrics: Mapping[str, Any], left: list[str]) -> None:
        text = {"text/plain": "  ".join([round_text(metrics), *quantities(self._newest), *left])}
        if self._line is None:
            display_data: Any = importlib.import_module("IPython.display").display
            self._line = display_data(text, raw=True, display_id=True)
        else:
            self._line.update(text, raw=True)


class Bar(Display):
    """The display in a terminal: a progress bar over the rounds, with the newest metrics, epsilon and time left."""

    def __init__(self, console: Console, *, among_others: bool = True) -> None:
        super().__init__()
        self.console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            expand=True,
            redirect_stdout=among_others,
            redirect_stderr=among_others,
        )
        self._task = self._progress.add_task("starting Flower", total=None, numbers="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _draw(self, metrics: Mapping[str, Any], left: list[str]) -> None:
        self._progress.update(
            self._task,
            description=round_text(metrics),
            completed=metrics.get("round", 0),
            total=metrics.get("num-rounds"),
            numbers="  ".join([*quantities(self._newest), *left]),
        )


def display(stream: TextIO | None = None) -> Display:
    """Return the display that fits a stream. On standard output (None) other lines may appear above the display."""
    console = Console(file=stream)
    if console.is_jupyter:
        return Notebook()
    if console.is_terminal and not console.is_dumb_terminal:
        return Bar(console, among_others=stream is None)
    return Display(stream)


def round_text(metrics: Mapping[str, Any]) -> str:
    """Return `round 3/50`."""
    last = metrics.get("num-rounds")
    return f"round {metrics.get('round', '?')}" + (f"/{last}" if last is not None else "")


def quantities(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics of `evaluate_fn`, the private metrics and epsilon of a line as texts; null epsilon is not private."""
    parts = [_quantity(name, value) for name, value in metric_columns.metrics(metrics).items()]
    parts += [private_quantity(name, *pair) for name, pair in metric_columns.private(metrics).items()]
    if "epsilon" in metrics:
        epsilon = metrics["epsilon"]
        parts.append("not private" if epsilon is None else f"epsilon {format_epsilon(epsilon, decimals=3)}")
    return parts


def private_quantity(name: str, value: float, error: float) -> str:
    """Return a metric of a private evaluation with its standard error: `private accuracy 81.2 ± 3.1 %`."""
    scale, digits, unit = (100, ".1f", " %") if metric_columns.percent(name) else (1, ".4f", "")
    return f"{name.replace('-', ' ')} {scale * value:{digits}} ± {scale * error:{digits}}{unit}"


def _quantity(name: str, value: float) -> str:
    if metric_columns.percent(name):
        return f"{name} {100 * value:.1f} %"
    return f"{name} {value:.4f}" if metric_columns.kind(name) == "loss" else f"{name} {value:.4g}"


def clock(seconds: float) -> str:
    """Return `m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
