"""Run points of an experiment, presets of the app with other settings, in this process over some seeds, and make tables."""

import json
import logging
import statistics
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

REPOSITORY = Path(__file__).resolve().parent.parent
# The grid of the tests calls the ClientApp in this process: `flwr run` takes 10 to 20 s to start, for every point and seed, which
# would add more than an hour. Strategies, clients, settings and data are the app's own.
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from grids import LocalGrid  # noqa: E402

from flower_dp.apps import records  # noqa: E402
from flower_dp.apps.client_app import app  # noqa: E402
from flower_dp.apps.methods import ParsedRunConfig  # noqa: E402
from flower_dp.apps.tasks.models import loss_of, predictions  # noqa: E402
from flower_dp.clients import TensorRecords, model_arrays  # noqa: E402
from flower_dp.privacy import accounting  # noqa: E402
from flower_dp.privacy.statement import PrivacyStatement  # noqa: E402
from flower_dp.running.apps import flatten  # noqa: E402
from flower_dp.strategies.strategy import DPStrategy  # noqa: E402

Row = dict[str, Any]

# Line styles that color-blind readers can distinguish, also in gray print.
LOOKS: tuple[dict[str, Any], ...] = tuple(
    {"color": color, "marker": mark, "markersize": 5, "capsize": 2}
    for color, mark in (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of an experiment: settings that differ from the preset, by run-config key, and the table's columns."""

    preset: str
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    numbers: Callable[[DPStrategy, PrivacyStatement], Row]


@dataclass(slots=True, kw_only=True)
class Measured:
    """A point's results, one entry per seed; `numbers` are the last seed's, since all seeds have the same noise and privacy."""

    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    numbers: Row = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean of the final test loss over the seeds."""
        return statistics.fmean(self.losses)

    @property
    def loss_spread(self) -> float:
        """The standard deviation of the final test loss over the seeds."""
        return deviation(self.losses)


def config_of(preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole run-config: the app's defaults, the preset, and these settings."""
    defaults: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    chosen = tomllib.loads((REPOSITORY / "flower_dp" / "apps" / "presets" / f"{preset}.toml").read_text())
    return flatten(defaults) | flatten(chosen) | dict(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run; `validation` is the final model's loss on records held out for validation, if there are any."""

    loss: float
    accuracy: float
    validation: float | None
    seconds: float
    numbers: Row


def run_once(point: Point, seed: int, data_dir: str) -> Outcome:
    """Run a point with a seed, which governs data split, initial model and order of records, but never noise."""
    started = time.monotonic()
    config = config_of(point.preset, {**point.settings, "seed": seed, "data-dir": data_dir})
    run, dealt = ParsedRunConfig.of(config), records.deal(records.config_of(config))
    model, num_rounds = run.model(), run.settings.num_rounds
    strategy = run.strategy(partial(_sizes, dealt))
    # One node hosts all clients, as a worker of the simulation hosts its part of them.
    grid, evaluate = LocalGrid(app, 1, **config), _validation(run, dealt, model)
    result = strategy.start(grid, model_arrays(model), num_rounds=num_rounds, evaluate_fn=evaluate)
    if strategy.missing.total or strategy.incidents:
        raise SystemExit(f"{dict(point.arguments)}, seed {seed}: {strategy.missing.total} replies missing; {strategy.incidents}")
    loss, accuracy = test(run, model, result.arrays, records.records_to_test_with(run, records.config_of(config)))
    validation = None if dealt.validation is None else test(run, model, result.arrays, dealt.validation)[0]
    return Outcome(
        loss=loss,
        accuracy=accuracy,
        validation=validation,
        seconds=round(time.monotonic() - started, 2),
        numbers=point.numbers(strategy, strategy.statement),
    )


def measure(point: Point, seeds: int, data_dir: str) -> Measured:
    """Run a point with seeds 0, 1, ..."""
    measured = Measured(arguments=point.arguments, settings=point.settings)
    for seed in range(seeds):
        outcome = run_once(point, seed, data_dir)
        measured.losses.append(outcome.loss)
        measured.accuracies.append(outcome.accuracy)
        measured.seconds.append(outcome.seconds)
        measured.numbers = outcome.numbers
    arguments = " ".join(f"{key}={value}" for key, value in point.arguments.items())
    print(f"{arguments}: loss {spread(measured.losses)}, {sum(measured.seconds):.0f} s", file=sys.stderr, flush=True)
    return measured


def _sizes(dealt: records.Dealt) -> dict[str, int]:
    return {name: len(own) for name, own in dealt.clients.items()}


def _validation(
    run: ParsedRunConfig, dealt: records.Dealt, model: nn.Module
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an evaluate_fn on the records held out for validation; without such records it returns nothing."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if dealt.validation is None:
            return None
        loss, accuracy = test(run, model, arrays, dealt.validation)
        return MetricRecord({"validation-loss": loss, "validation-accuracy": accuracy})

    return evaluate


@torch.inference_mode()
def test(run: ParsedRunConfig, model: nn.Module, arrays: ArrayRecord, public: TensorRecords) -> tuple[float, float]:
    """Return loss and accuracy of a model on public records."""
    model.load_state_dict(arrays.to_torch_state_dict())
    kind, everything = run.settings.model, torch.arange(len(public))
    batches = [public.batch(part, torch.device("cpu")) for part in torch.split(everything, 2000)]
    outputs, labels = torch.cat([model(inputs) for inputs, _ in batches]), torch.cat([targets for _, targets in batches])
    return loss_of(kind)(outputs, labels).item(), (predictions(kind, outputs) == labels).float().mean().item()


class Results:
    """The lines of a file, one per run, by point and seed; `point` makes a point, a dataclass, from its keys."""

    def __init__(self, path: Path, point: Callable[..., Any]) -> None:
        self._path = path
        self._rows: dict[Any, dict[int, Row]] = defaultdict(dict)
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            self._rows[point(**row.pop("case"))][row["seed"]] = row

    def has(self, case: Any, seed: int) -> bool:
        """Return whether the file has a run."""
        return seed in self._rows.get(case, {})

    def add(self, case: Any, row: Row) -> None:
        """Append a run to the file."""
        self._rows[case][row["seed"]] = row
        with self._path.open("a") as file:
            file.write(json.dumps({"case": asdict(case), **row}) + "\n")

    def rows(self, case: Any) -> list[Row]:
        """Return all runs of a point, by seed."""
        return [row for _, row in sorted(self._rows.get(case, {}).items())]

    @property
    def cases(self) -> list[Any]:
        """Return all points with a run."""
        return list(self._rows)


def spread(values: Sequence[float]) -> str:
    """Return mean +- standard deviation over seeds."""
    return f"{statistics.fmean(values):.3f} ± {deviation(values):.3f}"


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def difference(one: Measured, other: Measured) -> str:
    """Return the difference of two losses: mean of the seeds' differences +- standard error, and how often it is > 0."""
    apart = [a - b for a, b in zip(one.losses, other.losses, strict=True)]
    error = deviation(apart) / len(apart) ** 0.5
    return f"{statistics.fmean(apart):+.3f} ± {error:.3f} ({sum(a > 0 for a in apart)} of {len(apart)})"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table; the first row's keys are the columns."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= value < float("inf") else f"{value:.4g}"
    return str(value)


@contextmanager
def panels(path: Path, titles: Sequence[str], label: str, *, rows: int = 1) -> Iterator[list[Axes]]:
    """Yield panels to draw in, row by row, and write the picture; panels in a row share their vertical axis."""
    figure = Figure(figsize=(8.5, 0.4 + 3.0 * rows), layout="constrained")
    made = figure.subplots(rows, len(titles) // rows, sharey="row", squeeze=False)
    for line in made:
        line[0].set_ylabel(label)
    every = list(made.ravel())
    for axes, title in zip(every, titles, strict=True):
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
    yield every
    figure.savefig(path, dpi=70)


def quiet() -> None:
    """Silence Flower's log of rounds and statements."""
    logging.getLogger("flwr").setLevel(logging.ERROR)


def remember_costs() -> None:
    """Cache the cost of equal events: points of an experiment charge the same few, and cost depends only on the events."""
    compute, known = accounting.epsilon, dict[Any, Any]()

    def epsilon(event: Any, **arguments: Any) -> Any:
        key = (repr(event), *sorted(arguments.items()))
        return known[key] if key in known else known.setdefault(key, compute(event, **arguments))

    accounting.epsilon = epsilon
