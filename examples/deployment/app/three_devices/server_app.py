"""The server: runs FedSGD-DPC with three devices, tests on public records, writes the privacy statement."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flower_dp.clients import model_arrays
from flower_dp.strategies import FedSGDDPC
from three_devices.task import make_model, read

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the settings of the run-config."""
    config = context.run_config
    strategy = FedSGDDPC(
        mechanism="laplace",
        num_clients=int(config["num-devices"]),
        cohort_size=int(config["num-devices"]),
        num_records=int(config["num-records"]),
        clip_norm=float(config["clip-norm"]),
        epsilon=float(config["epsilon"]),
        num_replies=int(config["num-replies"]),
        learning_rate=float(config["learning-rate"]),
        registration_timeout=float(config["registration-timeout"]),
    )
    test_data = str(config["test-data"])
    records = read(test_data) if test_data else None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if records is None:
            return None
        model, (inputs, targets) = make_model(), records
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.inference_mode():
            return MetricRecord({"accuracy": (model(inputs).argmax(1) == targets).float().mean().item()})

    try:
        result = strategy.start(
            grid,
            model_arrays(make_model()),
            num_rounds=int(config["num-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=evaluate,
        )
    finally:  # what was released before a failure stays released
        folder = Path(str(config["output-dir"]))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "statement.txt").write_text(str(strategy.statement), encoding="utf-8")
        (folder / "statement.json").write_text(json.dumps(strategy.statement.to_dict()), encoding="utf-8")
    metrics = {f"round {number}": dict(found) for number, found in result.evaluate_metrics_serverapp.items()}
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
