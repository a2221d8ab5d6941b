"""The Flower ServerApp: runs the strategy, tests every model on the public test set, and writes the run's folder."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from apps.client_app import all_records, standardize
from apps.methods import Run
from apps.parts import training_of
from apps.settings import Settings
from apps.tasks import Task, load_task
from apps.tasks.models import make
from flower_dp.clients import model_arrays
from flower_dp.running.run_folder import RunFolder
from flower_dp.strategies.strategy import DPStrategy
from flower_dp.wire import numpy_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the settings of the run-config."""
    run = Run.of(context.run_config)
    settings = run.settings
    training_of(settings)
    strategy = run.strategy(lambda: _public_sizes(context.run_config))
    folder = RunFolder.create(settings.output_path(), dict(context.run_config), settings.run_name)
    task = load_task(settings.task, settings.data_dir)
    model = make(settings.model, bias=settings.model_bias, seed=settings.seed)
    try:
        result = strategy.start(
            grid,
            model_arrays(model),
            num_rounds=settings.num_rounds,
            timeout=settings.round_timeout,
            evaluate_fn=_recorder(folder, settings, strategy, model, task),
        )
    finally:
        statement = strategy.statement
        folder.state(statement.to_dict(), str(statement))
    folder.finish(numpy_arrays(result.arrays, limit=2**40))


def _public_sizes(run_config: Mapping[str, Any]) -> dict[str, int]:
    """Return every client's number of records, dealt as the clients deal them."""
    _, clients = all_records(tuple(sorted(run_config.items())))
    return {name: len(records) for name, records in clients.items()}


def _recorder(
    folder: RunFolder, settings: Settings, strategy: DPStrategy, model: nn.Module, task: Task
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an evaluate_fn that tests the model and writes the round's line of metrics."""
    images, labels = standardize(torch.from_numpy(task.test_images)), torch.from_numpy(task.test_labels)
    started = time.monotonic()

    def record(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        line: dict[str, Any] = {"round": server_round, "num-rounds": settings.num_rounds}
        last = server_round == settings.num_rounds
        due = settings.evaluate_every and server_round % settings.evaluate_every == 0
        metrics = _test(model, arrays, images, labels) if due or last else None
        line |= metrics or {}
        if server_round:
            line |= strategy.rounds[-1].public()
        else:
            line["epsilon"] = 0.0
        folder.append(line | {"delta": strategy.delta, "elapsed": round(time.monotonic() - started, 3)})
        return MetricRecord({**metrics}) if metrics else None

    return record


@torch.inference_mode()
def _test(model: nn.Module, arrays: ArrayRecord, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return loss and accuracy on the public test set."""
    model.load_state_dict(arrays.to_torch_state_dict())
    logits = torch.cat([model(batch) for batch in torch.split(images, 2000)])
    loss = nn.functional.cross_entropy(logits, labels).item()
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean().item()}
