"""The server: runs FedSGD-DPC with three devices, tests on public records, and keeps a run folder to resume from."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flower_dp import record_run
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

    # Charges are stored in the folder before a message leaves, so a killed run can be resumed with resume=true.
    record_run(
        strategy,
        grid,
        model_arrays(make_model()),
        num_rounds=int(config["num-rounds"]),
        timeout=float(config["round-timeout"]),
        evaluate_fn=evaluate,
        config=config,
        name="three-devices",
        path=str(config["output-dir"]) or None,
        resume=bool(config["resume"]),
    )
