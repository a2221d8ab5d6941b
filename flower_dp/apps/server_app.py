"""The Flower ServerApp: runs the strategy, tests models on public records, and writes the run folder."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flower_dp.apps.client_parts import training_of
from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.records import config_of, deal, records_to_test_with, sizes_of
from flower_dp.apps.settings import Settings
from flower_dp.apps.tasks.models import loss_of, predictions
from flower_dp.clients import TensorRecords, model_arrays
from flower_dp.core.root_logger import SHOWN
from flower_dp.running.run_recorder import record_run

app = ServerApp()
log = logging.getLogger("flwr")
_TEST_BATCH = 2000


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the settings of the run-config."""
    run = ParsedRunConfig.of(context.run_config)
    settings, config = run.settings, config_of(context.run_config)
    training_of(settings)
    strategy = run.strategy(sizes_of(context.run_config))
    validation = deal(config).validation if settings.validation_ratio else None
    test = records_to_test_with(run, config)
    public = {"": test} | ({} if validation is None else {"validation-": validation})
    log.info("Task %s: %s", settings.task, run.task().source)
    model = run.model()
    result = record_run(
        strategy,
        grid,
        model_arrays(model),
        num_rounds=settings.num_rounds,
        config=context.run_config,
        name=settings.run_name,
        path=settings.path_of("output_dir"),
        evaluate_fn=_evaluation(settings, model, public),
        not_covered=_left_out(settings),
        resume=settings.resume,
        timeout=settings.round_timeout,
    )
    _warn_of_one_class(result.evaluate_metrics_serverapp, test)


def _left_out(settings: Settings) -> tuple[str, ...]:
    """Return the records that this app's guarantee does not cover, as text."""
    if not settings.holds_out:
        return ()
    ratios = f"validation-ratio={settings.validation_ratio:g}, test-ratio={settings.test_ratio:g}"
    return (f"records that clients hold out ({ratios}): they are taken as public, and no client trains on them",)


def _evaluation(
    settings: Settings, model: nn.Module, public: Mapping[str, TensorRecords]
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return an evaluate_fn that tests the model on public records; the keys of `public` are prefixes of metric names."""
    everywhere = {prefix: records.batch(torch.arange(len(records)), torch.device("cpu")) for prefix, records in public.items()}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        due = settings.test_every and server_round % settings.test_every == 0
        metrics: dict[str, float] = {}
        for prefix, (inputs, labels) in everywhere.items() if due or server_round == settings.num_rounds else ():
            values = _test(model, settings.model, arrays, inputs, labels)
            metrics |= {prefix + name: value for name, value in values.items()}
        return MetricRecord({**metrics}) if metrics else None

    return evaluate


def _warn_of_one_class(metrics: Mapping[int, MetricRecord], public: TensorRecords) -> None:
    """Warn if no round's model was better than always predicting the most frequent class."""
    accuracies = [float(str(metrics[number]["accuracy"])) for number in metrics if number]
    labels = public.batch(torch.arange(len(public)), torch.device("cpu"))[-1]
    share = max(Counter(labels.tolist()).values()) / len(labels)
    if accuracies and max(accuracies) <= share + math.sqrt(share * (1 - share) / len(labels)):
        why = (
            "The model learned nothing: its accuracy was at most %.1f %%, and %.1f %% of the test records have the most "
            "frequent class. Try another learning rate, more steps or rounds, or less noise."
        )
        log.warning(why, 100 * max(accuracies), 100 * share, extra=SHOWN)  # on the screen


@torch.inference_mode()
def _test(model: nn.Module, kind: str, arrays: ArrayRecord, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return the loss and the accuracy of a model of one kind on public records."""
    model.load_state_dict(arrays.to_torch_state_dict())
    outputs = torch.cat([model(batch) for batch in torch.split(inputs, _TEST_BATCH)])
    right = predictions(kind, outputs) == labels
    return {"loss": loss_of(kind)(outputs, labels).item(), "accuracy": right.float().mean().item()}
