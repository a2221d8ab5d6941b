"""The Flower ServerApp: runs the strategy, tests every model on public records, and writes the run folder."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from apps.methods import Run
from apps.parts import training_of
from apps.records import Config, config_of, deal, records_to_test_with
from apps.settings import Settings
from apps.tasks.models import loss_of, predictions
from flower_dp.clients import TensorRecords, model_arrays
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running.run_folder import RunFolder
from flower_dp.strategies.strategy import DPStrategy
from flower_dp.wire import numpy_arrays

app = ServerApp()
log = logging.getLogger("flwr")
_TEST_BATCH = 2000


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the settings of the run-config."""
    run = Run.of(context.run_config)
    settings, config = run.settings, config_of(context.run_config)
    training_of(settings)
    strategy = run.strategy(lambda: _public_sizes(config))
    public = _public_records(run, config)
    folder = RunFolder.create(settings.output_path(), dict(context.run_config), settings.run_name)
    log.info("task %s: %s", settings.task, run.task().source)
    model = run.model()
    try:
        result = strategy.start(
            grid,
            model_arrays(model),
            num_rounds=settings.num_rounds,
            timeout=settings.round_timeout,
            evaluate_fn=_recorder(folder, settings, strategy, model, public),
        )
    finally:
        statement = _whole(strategy.statement, settings)
        folder.state(statement.to_dict(), str(statement))
    folder.finish(numpy_arrays(result.arrays, limit=2**40))


def _public_sizes(config: Config) -> dict[str, int]:
    """Return every client's number of records to train on, dealt as the clients deal them."""
    return {name: len(records) for name, records in deal(config).clients.items()}


def _public_records(run: Run, config: Config) -> dict[str, TensorRecords]:
    """Return the records that the server tests models with, by what stands before the names of their metrics."""
    validation = deal(config).validation if run.settings.validation_ratio else None
    return {"": records_to_test_with(run, config)} | ({"validation-": validation} if validation is not None else {})


def _whole(statement: PrivacyStatement, settings: Settings) -> PrivacyStatement:
    """Return the statement, with what this app's guarantee does not cover."""
    if not settings.holds_out:
        return statement
    ratios = f"validation-ratio={settings.validation_ratio:g}, test-ratio={settings.test_ratio:g}"
    what = f"records that clients hold out ({ratios}): they are taken as public, and no client trains on them"
    return replace(statement, not_covered=(*statement.not_covered, what))


def _recorder(
    folder: RunFolder, settings: Settings, strategy: DPStrategy, model: nn.Module, public: Mapping[str, TensorRecords]
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an evaluate_fn that tests the model and writes the round's line of metrics."""
    everywhere = {prefix: records.batch(torch.arange(len(records)), torch.device("cpu")) for prefix, records in public.items()}
    started = time.monotonic()

    def record(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        line: dict[str, Any] = {"round": server_round, "num-rounds": settings.num_rounds}
        last = server_round == settings.num_rounds
        due = settings.evaluate_every and server_round % settings.evaluate_every == 0
        metrics: dict[str, float] = {}
        for prefix, (inputs, labels) in everywhere.items() if due or last else ():
            found = _test(model, settings.model, arrays, inputs, labels)
            metrics |= {prefix + name: value for name, value in found.items()}
        line |= metrics
        line |= strategy.line_of(server_round)
        folder.append(line | {"delta": strategy.delta, "elapsed": round(time.monotonic() - started, 3)})
        return MetricRecord(dict(metrics)) if metrics else None

    return record


@torch.inference_mode()
def _test(model: nn.Module, kind: str, arrays: ArrayRecord, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return loss and accuracy of a model of some kind on public records."""
    model.load_state_dict(arrays.to_torch_state_dict())
    outputs = torch.cat([model(batch) for batch in torch.split(inputs, _TEST_BATCH)])
    right = predictions(kind, outputs) == labels
    return {"loss": loss_of(kind)(outputs, labels).item(), "accuracy": right.float().mean().item()}
