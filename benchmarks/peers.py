"""Compare one job here, in Flower's DP wrapper and in pfl-research: accuracy, epsilon by each accountant and ours, seconds.

    python benchmarks/peers.py [--rounds N] [--seeds N] [--data-dir DIR]

The job is `mlp` of benchmarks/rounds.py: 1,000 clients with 60 digits each, an MLP, 100 clients per round, one local epoch of
SGD, clip norm 0.5, noise multiplier 0.9, the noise on the sum of the clipped updates. This package runs it once with cohorts of a
fixed size and once with Poisson sampling. Seconds are those of the whole command, with its start. Accuracies are of the last
model on the task's test records; they differ between runs, because every run draws new noise. pfl-research takes part if `pfl`
can be imported (`pip install pfl==0.6.0`). The program prints a Markdown table.

"By our accountant" is the epsilon of the release that each library describes: for Flower, of cohorts drawn without replacement.
pfl-research draws a cohort with replacement, which no accountant here bounds.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import flwr
import torch
from dp_accounting import GaussianDpEvent
from rounds import COHORT, JOBS, REPOSITORY, begun, pfl_result

from flower_dp.core.sampling import FixedSizeSampling
from flower_dp.privacy import accounting
from flower_dp.running.run_folder import METRICS, STATEMENT_JSON
from tests.flower.superlink import flwr_run

(JOB,) = (job for job in JOBS if job.name == "mlp")
DELTA = JOB.num_clients**-1.1
CLIP_NORM, NOISE_MULTIPLIER = 0.5, 0.9
OF_ALL = {"num_clients": JOB.num_clients, "num_records": JOB.records_per_client, "cohort": COHORT, "delta": DELTA}
OF_ALL |= {"clip_norm": CLIP_NORM, "noise_multiplier": NOISE_MULTIPLIER}

# The job as Flower's users write it, with Flower's wrapper and its accountant.
FLOWERS_APP = """
import json
import sys
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

sys.path.insert(0, {repository!r})
from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.models import make
from flower_dp.apps.tasks.partitions import partition


@cache
def dealt():
    task = load_task("mnist", {data_dir!r})
    return task, partition(
        "sample", task.train_labels, num_clients={num_clients}, seed={seed}, dirichlet_alpha=1.0, classes_per_client=1,
        records_per_client={num_records}
    )


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    task, parts = dealt()
    rows = parts[context.node_config["partition-id"]]
    inputs, labels = task.prepare(torch.from_numpy(task.train_inputs[rows])), torch.from_numpy(task.train_labels[rows])
    model = make("mlp", seed=0)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.split(torch.randperm(len(rows)), 10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    content = {{"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({{"num-examples": len(rows)}})}}
    return Message(RecordDict(content), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    task = dealt()[0]
    inputs, labels = task.prepare(torch.from_numpy(task.test_inputs)), torch.from_numpy(task.test_labels)
    inner = FedAvg(
        fraction_train={cohort} / {num_clients}, fraction_evaluate=0.0, min_train_nodes={cohort},
        min_available_nodes={num_clients},
    )
    accountant = RdpAccountant(PrivacyConfig(
        target_delta={delta}, population_size={num_clients}, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    ))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        inner, noise_multiplier={noise_multiplier}, clipping_norm={clip_norm}, num_sampled_clients={cohort}, accountant=accountant
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round != {num_rounds}:
            return None
        model = make("mlp", seed=0)
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            return MetricRecord({{"accuracy": (model(inputs).argmax(1) == labels).double().mean().item()}})

    initial = ArrayRecord(make("mlp", seed={seed}).state_dict())
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds={num_rounds}, evaluate_fn=evaluate)
    found = {{
        "accuracy": result.evaluate_metrics_serverapp[{num_rounds}]["accuracy"], "own_epsilon": strategy.privacy_spent().epsilon
    }}
    Path({result!r}).write_text(json.dumps(found))
"""
PROJECT = """
[project]
name = "flowers-wrapper"
version = "1.0.0"

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "flowers_wrapper:server"
clientapp = "flowers_wrapper:client"

[tool.flwr.app.config]
"""


def ours(num_rounds: int, seed: int, data_dir: str, *, poisson: bool) -> dict[str, Any]:
    """Run the job as `flower-dp run` does."""
    settings = JOB.overrides(num_rounds, data_dir) | {"seed": seed, "test-every": num_rounds}
    if poisson:
        del settings["cohort-size"]
        settings |= {"sampling": "poisson", "sampling-rate": COHORT / JOB.num_clients}
    with tempfile.TemporaryDirectory() as place:
        folder, started = Path(place, "run"), time.monotonic()
        if begun(REPOSITORY, settings, folder).wait():
            raise SystemExit("flower-dp run failed")
        seconds = time.monotonic() - started
        statement = json.loads((folder / STATEMENT_JSON).read_text())
        last = json.loads((folder / METRICS).read_text().splitlines()[-1])
    told = statement["guarantee"]
    of_statement = {"own_epsilon": told["epsilon"], "our_epsilon": told["epsilon"], "relation": told["relation"]}
    return {"accuracy": last["accuracy"], "seconds": seconds} | of_statement


def flowers(num_rounds: int, seed: int, data_dir: str) -> dict[str, Any]:
    """Run the job as a Flower app with Flower's wrapper, by plain `flwr run`, with one SuperNode per client."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as folder:
        app = Path(place)
        result = app / "result.json"
        source = FLOWERS_APP.format(
            repository=str(REPOSITORY),
            data_dir=data_dir,
            result=str(result),
            seed=seed,
            num_rounds=num_rounds,
            **OF_ALL,
        )
        (app / "flowers_wrapper.py").write_text(source)
        (app / "pyproject.toml").write_text(PROJECT)
        started = time.monotonic()
        ended = flwr_run(app, Path(folder), {}, num_supernodes=JOB.num_clients, environment={})
        if ended.status != "completed":
            raise SystemExit(f"flwr run: {ended.status} {ended.details}")
        seconds = time.monotonic() - started
        found: dict[str, Any] = json.loads(result.read_text())
    event = FixedSizeSampling(cohort_size=COHORT).event(GaussianDpEvent(NOISE_MULTIPLIER), 1, JOB.num_clients)
    epsilon = accounting.epsilon(accounting.repeated(event, num_rounds), delta=DELTA, relation="replace-one").epsilon
    return found | {"our_epsilon": epsilon, "relation": "replace-one", "seconds": seconds}


def pfls(num_rounds: int, seed: int, data_dir: str) -> dict[str, Any]:
    """Run the job with pfl-research on two processes; its accountant expects Poisson sampling."""
    from pfl.privacy.privacy_accountant import PLDPrivacyAccountant  # noqa: PLC0415  (not everybody has it)

    started = time.monotonic()
    found = pfl_result(JOB, num_rounds, data_dir, seed)
    seconds = time.monotonic() - started
    spent = PLDPrivacyAccountant(
        num_compositions=num_rounds,
        sampling_probability=COHORT / JOB.num_clients,
        mechanism="gaussian",
        delta=DELTA,
        noise_parameter=NOISE_MULTIPLIER,
    )
    return {"accuracy": found["accuracy"], "own_epsilon": spent.epsilon, "our_epsilon": None, "relation": "", "seconds": seconds}


def main() -> None:
    """Run all jobs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", default="")
    options = parser.parse_args()
    kinds = {
        "flower-dp, Poisson sampling": lambda *of: ours(*of, poisson=True),
        "flower-dp, fixed cohort size": lambda *of: ours(*of, poisson=False),
        "Flower's DP wrapper": flowers,
    }
    if importlib.util.find_spec("pfl") is not None:
        kinds["pfl-research"] = pfls
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, "
        f"Python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}; "
        f"{options.rounds} rounds, {options.seeds} seeds, delta {DELTA:.3g}\n"
    )
    print("| | accuracy | epsilon by its own accountant | epsilon by ours | seconds |\n|---|---|---|---|---|", flush=True)
    for name, run in kinds.items():
        found = [run(options.rounds, seed, options.data_dir) for seed in range(options.seeds)]
        print(f"| {name} | {_row(found)} |", flush=True)


def _row(found: list[dict[str, Any]]) -> str:
    first = found[0]
    accuracies, seconds = ([one[key] for one in found] for key in ("accuracy", "seconds"))
    spread = statistics.stdev(accuracies) if len(found) > 1 else 0.0
    by_ours = "none bounds it" if first["our_epsilon"] is None else f"{first['our_epsilon']:.2f} ({first['relation']})"
    return (
        f"{100 * statistics.fmean(accuracies):.1f} ± {100 * spread:.1f} % | {first['own_epsilon']:.2f} | {by_ours} | "
        f"{statistics.median(seconds):.0f}"
    )


if __name__ == "__main__":
    main()
