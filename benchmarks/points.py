"""Points of an experiment: a preset of the app with other settings, run in this process over some seeds, and tables of them."""

import logging
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import nn

REPOSITORY = Path(__file__).resolve().parent.parent
# The grid of the tests calls the ClientApp in this process: the 10 to 20 s that `flwr run` takes to start, once a point and seed,
# would be more than an hour. Strategies, clients, settings and data are the app's own.
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from grids import LocalGrid  # noqa: E402

from apps import records  # noqa: E402
from apps.client_app import app  # noqa: E402
from apps.methods import Run  # noqa: E402
from apps.tasks import load_task  # noqa: E402
from apps.tasks.models import make  # noqa: E402
from flower_dp.clients import model_arrays  # noqa: E402
from flower_dp.privacy.statement import PrivacyStatement  # noqa: E402
from flower_dp.running.apps import flatten  # noqa: E402
from flower_dp.strategies.strategy import DPStrategy  # noqa: E402

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Settings of a run that are not the preset's, by run-config key, and what the table says of the point."""

    preset: str
    settings: Mapping[str, Any]
    words: Mapping[str, Any]
    numbers: Callable[[DPStrategy, PrivacyStatement], Row]


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a point gave, one entry a seed; `numbers` are the last seed's: all seeds have the same noise and privacy."""

    words: Mapping[str, Any]
    settings: Mapping[str, Any]
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    numbers: Row = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean final test loss over the seeds."""
        return statistics.fmean(self.losses)


def config_of(preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole run-config: the app's defaults, the preset, and these settings."""
    defaults: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    chosen = tomllib.loads((REPOSITORY / "apps" / "presets" / f"{preset}.toml").read_text())
    return flatten(defaults) | flatten(chosen) | dict(settings)


def measure(point: Point, seeds: int, data_dir: str) -> Measured:
    """Run a point with seeds 0, 1, ...; a seed governs data split, initial model and order of records, never noise."""
    measured = Measured(words=point.words, settings=point.settings)
    for seed in range(seeds):
        started = time.monotonic()
        config = config_of(point.preset, {**point.settings, "seed": seed, "data-dir": data_dir})
        run = Run.of(config)
        settings = run.settings
        model = make(settings.model, bias=settings.model_bias, seed=seed)
        strategy = run.strategy(partial(_sizes, config))
        # One node hosts all clients, as a worker of the simulation hosts its part of them.
        result = strategy.start(LocalGrid(app, 1, **config), model_arrays(model), num_rounds=settings.num_rounds)
        if strategy.missing.total or strategy.incidents:
            raise SystemExit(f"{dict(point.words)}, seed {seed}: {strategy.missing.total} replies missing; {strategy.incidents}")
        loss, accuracy = test(model, result.arrays, data_dir)
        measured.losses.append(loss)
        measured.accuracies.append(accuracy)
        measured.seconds.append(round(time.monotonic() - started, 2))
        measured.numbers = point.numbers(strategy, strategy.statement)
    words = " ".join(f"{key}={value}" for key, value in point.words.items())
    print(f"{words}: loss {spread(measured.losses)}, {sum(measured.seconds):.0f} s", file=sys.stderr, flush=True)
    return measured


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(own) for name, own in records.deal(records.config_of(config)).clients.items()}


@torch.inference_mode()
def test(model: nn.Module, arrays: ArrayRecord, data_dir: str) -> tuple[float, float]:
    """Return loss and accuracy on the task's test set."""
    task = load_task("mnist", data_dir)
    model.load_state_dict(arrays.to_torch_state_dict())
    labels = torch.from_numpy(task.test_labels)
    logits = torch.cat([model(task.prepare(batch)) for batch in torch.split(torch.from_numpy(task.test_inputs), 2000)])
    return nn.functional.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def spread(values: Sequence[float]) -> str:
    """Return mean +- standard deviation over seeds."""
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


def difference(one: Measured, other: Measured) -> str:
    """Return how much larger one's loss is than the other's: mean of the seeds' differences +- standard error, and how often."""
    apart = [a - b for a, b in zip(one.losses, other.losses, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    return f"{statistics.fmean(apart):+.3f} ± {error:.3f} ({sum(a > 0 for a in apart)} of {len(apart)})"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table; the first row's keys are the columns."""
    cells = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if 1000 <= value < float("inf") else f"{value:.4g}"
    return str(value)


def quiet() -> None:
    """Silence Flower's log of rounds and statements."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
