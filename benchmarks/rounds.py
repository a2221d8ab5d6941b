"""Compare seconds per round of `flower-dp run` with plain PyTorch loops and pfl-research, in the same session.

    python benchmarks/rounds.py [mlp] [mlp-module] [cnn-small] [logistic-1000] [logistic-50000] [logistic-1000000]
        [--rounds N] [--data-dir DIR]

For every job the program prints the mean seconds per round of each way (without start-up), the ratios, the memory of all
processes of our runs, and the seconds from the start to the end of round 1. The plain loop runs before and after: in one process,
with one torch thread and with all, and in two processes at once, with half of the clients and one thread each (the slower one
counts). The fastest of each kind counts. Its convolutions have torch's own layout in memory. pfl-research runs on two processes,
if `pfl` can be imported (`pip install pfl==0.6.0`). `mlp-module` is the job `mlp` as a user's own app (`flower_dp.app`), whose
model is a hand-written `nn.Module` instead of `nn.Sequential`.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from round_times import RoundTimes  # noqa: E402

from flower_dp.apps.tasks import load_task  # noqa: E402
from flower_dp.apps.tasks.models import make  # noqa: E402
from flower_dp.apps.tasks.partitions import partition  # noqa: E402

WARM_UP = 3
COHORT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One comparison: central DP-FedAvg, one local epoch, batches of 10, `cohort` clients per round."""

    name: str
    model: str
    num_clients: int
    records_per_client: int
    cohort: int = COHORT
    own_app: bool = False

    def overrides(self, num_rounds: int, data_dir: str) -> dict[str, Any]:
        """Return the run-config."""
        of_the_task = {"model": self.model, "data-dir": data_dir, "partition": "sample"}
        of_the_task["records-per-client"] = self.records_per_client
        return ({} if self.own_app else of_the_task) | {
            "method": "dp-fedavg",
            "num-clients": self.num_clients,
            "sampling": "fixed-size",
            "cohort-size": self.cohort,
            "dp-fedavg.target-epsilon": 0.0,
            "num-rounds": num_rounds,
            "local-epochs": 1,
            "batch-size": 10,
            "momentum": 0.0,
            "learning-rate": 0.1,
            "learning-rate-decay": 0.0,
            "test-every": 0,
        }

    def dealt(self, labels: np.ndarray, seed: int = 0) -> list[np.ndarray]:
        """Return the indices of each client's records."""
        of_others = {"dirichlet_alpha": 1.0, "classes_per_client": 1}
        size = self.records_per_client
        return partition("sample", labels, num_clients=self.num_clients, seed=seed, records_per_client=size, **of_others)


JOBS = (
    Job(name="mlp", model="mlp", num_clients=1000, records_per_client=60),
    Job(name="mlp-module", model="mlp", num_clients=1000, records_per_client=60, own_app=True),
    Job(name="cnn-small", model="cnn-small", num_clients=100, records_per_client=600, cohort=10),
    Job(name="logistic-1000", model="logistic", num_clients=1000, records_per_client=20),
    Job(name="logistic-50000", model="logistic", num_clients=50_000, records_per_client=20),
    Job(name="logistic-1000000", model="logistic", num_clients=1_000_000, records_per_client=20),
)

# The job's clients and the layers of its model in an app of somebody's own.
OWN_APP = """
import sys
from functools import cache

import torch
from torch import nn

import flower_dp

sys.path.insert(0, {repository!r})
from flower_dp.apps.tasks import load_task
from flower_dp.apps.tasks.partitions import partition


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(784, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images):
        return self.output(torch.relu(self.hidden(images.flatten(1))))


@cache
def dealt(num_clients):
    task = load_task("mnist", {data_dir!r})
    return task, partition(
        "sample", task.train_labels, num_clients=num_clients, seed=0, dirichlet_alpha=1.0, classes_per_client=1,
        records_per_client={records_per_client}
    )


def records(client, num_clients):
    task, rows = dealt(num_clients)
    own = rows[client]
    return task.prepare(torch.from_numpy(task.train_inputs[own])), torch.from_numpy(task.train_labels[own])


app = flower_dp.app(model_fn=Perceptron, data_fn=records)
"""
OWN_PROJECT = """
[project]
name = "own-mlp"
version = "1.0.0"

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "own_mlp:app.server"
clientapp = "own_mlp:app.client"

[tool.flwr.app.config]
"""


def own_app(job: Job, data_dir: str, folder: Path) -> Path:
    """Write the job as a user's own app, and return its folder."""
    source = OWN_APP.format(repository=str(REPOSITORY), data_dir=data_dir, records_per_client=job.records_per_client)
    (folder / "own_mlp.py").write_text(source)
    config = job.overrides(1, data_dir) | {"output-dir": ""}
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    (folder / "pyproject.toml").write_text(OWN_PROJECT + "\n".join(lines) + "\n")
    return folder


def plain_loop(job: Job, num_rounds: int, data_dir: str, parts: int = 1) -> float:
    """Return the mean seconds per round of DP-FedAvg in plain PyTorch, with one of several equal parts of the clients."""
    task = load_task("mnist", data_dir)
    dealt = job.dealt(task.train_labels)
    images, labels = torch.from_numpy(task.train_inputs), torch.from_numpy(task.train_labels)
    model = make(job.model, seed=0)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    rng = np.random.default_rng()
    seconds = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        total = torch.zeros_like(vector)
        for client in rng.choice(job.num_clients, job.cohort // parts, replace=False):
            rows = torch.from_numpy(dealt[client])
            inputs, targets = task.prepare(images[rows]), labels[rows]
            nn.utils.vector_to_parameters(vector.clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in torch.split(torch.randperm(len(rows)), 10):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
            update = nn.utils.parameters_to_vector(model.parameters()).detach() - vector
            total += update * min(1.0, 0.5 / float(update.norm()))
        vector = vector + (total + 0.45 * torch.randn_like(total)) / job.cohort
        seconds.append(time.perf_counter() - started)
    return statistics.fmean(seconds[WARM_UP:])


def fastest_plain_loop(job: Job, num_rounds: int, data_dir: str) -> float:
    """Return the plain loop's time with one thread or with all, whichever is less."""
    times = []
    for threads in {1, os.cpu_count() or 1}:
        torch.set_num_threads(threads)
        times.append(plain_loop(job, num_rounds, data_dir))
    return min(times)


def two_processes(job: Job, num_rounds: int, data_dir: str) -> float:
    """Return the mean seconds per round of two plain loops at once, each with half of the clients and one thread."""
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return max(pool.map(plain_loop, *zip(*[(job, num_rounds, data_dir, 2)] * 2, strict=True)))


def our_run(job: Job, num_rounds: int, data_dir: str) -> dict[str, Any]:
    """Run the job by `flower-dp run`; return seconds per round and the memory of its processes early and late."""
    memory: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as app, RoundTimes(Path(folder, "run")) as rounds:
        started = time.monotonic()
        target = own_app(job, data_dir, Path(app)) if job.own_app else REPOSITORY
        process = begun(target, job.overrides(num_rounds, data_dir), Path(folder, "run"))
        while process.poll() is None:
            # Reading the memory of all processes slows them, so it happens only twice.
            if len(rounds.ends) > (num_rounds // 4, num_rounds - 1, math.inf)[len(memory)]:
                memory.append(tree_memory())
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{job.name}: the run failed")
    return times(rounds.ends) | {
        "first_round_seconds": rounds.ends[1] - started,
        "memory_gb_early": memory[0][0],
        "memory_gb_late": memory[-1][0],
        "memory_gb_summed_rss": memory[-1][1],
    }


def begun(target: Path, settings: Mapping[str, Any], folder: Path) -> "subprocess.Popen[bytes]":
    """Start `flower-dp run`, with output of errors only."""
    command = [sys.executable, "-m", "flower_dp.cli.entry", "run", str(target), "--output-dir", str(folder)]
    for key, value in settings.items():
        command += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)


def pfl_run(job: Job, num_rounds: int, data_dir: str) -> dict[str, Any]:
    """Run the job with pfl-research on two processes."""
    started = time.time()
    ends = pfl_result(job, num_rounds, data_dir)["ends"]
    return times(ends) | {"first_round_seconds": ends[0] - started}


def pfl_result(job: Job, num_rounds: int, data_dir: str, seed: int = 0) -> dict[str, Any]:
    """Run the job with pfl-research on two processes; return the times at which rounds ended, and the last model's accuracy."""
    program = Path(__file__).with_name("pfl_rounds.py")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        words = [str(program), job.name, str(num_rounds), data_dir, str(result), str(seed)]
        subprocess.run([*torchrun, *words], check=True, capture_output=True)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def times(ends: list[float]) -> dict[str, Any]:
    """Return the seconds between the ends of rounds, without the first rounds."""
    rounds = sorted(after - before for before, after in pairwise(ends[WARM_UP:]))
    quantiles = {f"p{part}": rounds[len(rounds) * part // 100] for part in (10, 90)}
    return {"seconds": statistics.fmean(rounds)} | quantiles


def tree_memory() -> tuple[float, float]:
    """Return the memory of all descendant processes in GB: PSS, which counts shared pages once, and summed RSS."""
    shared, resident = 0, 0
    for process in psutil.Process().children(recursive=True):
        try:
            resident += process.memory_info().rss
            full = process.memory_full_info()
            shared += getattr(full, "pss", full.rss)
        except psutil.Error:
            continue
    return shared / 1e9, resident / 1e9


def main() -> None:
    """Run the chosen jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="names of jobs; default: all")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--data-dir", default="")
    options = parser.parse_args()
    if unknown := set(options.jobs) - {job.name for job in JOBS}:
        parser.error(f"unknown jobs {sorted(unknown)}; known are {', '.join(job.name for job in JOBS)}")
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    for job in JOBS:
        if options.jobs and job.name not in options.jobs:
            continue
        loops = (fastest_plain_loop, two_processes)
        before = [loop(job, 20, options.data_dir) for loop in loops]
        runs = {"flower-dp run": our_run(job, options.rounds, options.data_dir)}
        if importlib.util.find_spec("pfl") is not None and not job.own_app:
            runs["pfl"] = pfl_run(job, options.rounds, options.data_dir)
        after = [loop(job, 20, options.data_dir) for loop in loops]
        plain, limit = map(min, before, after)
        print(f"{job.name}: plain loop {plain:.3f} s, two processes {limit:.3f} s", flush=True)
        for name, run in runs.items():
            line = (
                f"  {name}: {run['seconds']:.3f} s a round (p10 {run['p10']:.3f}, p90 {run['p90']:.3f}), "
                f"{run['seconds'] / plain:.2f} of the plain loop, {run['seconds'] / limit:.2f} of two processes; "
                f"{run['first_round_seconds']:.1f} s to the end of round 1"
            )
            if "memory_gb_late" in run:
                line += (
                    f"; memory {run['memory_gb_early']:.2f} GB after a quarter, {run['memory_gb_late']:.2f} GB at the end "
                    f"(summed RSS {run['memory_gb_summed_rss']:.2f} GB)"
                )
            print(line, flush=True)


if __name__ == "__main__":
    main()
