"""Compare local training on a GPU with a plain PyTorch loop and a vmap over all clients, in one process on one card.

    python benchmarks/gpu.py [mlp] [cnn] [resnet] [logistic] [--data-dir DIR] [--json FILE] [--budget SECONDS] [--tf32]
        [--device cuda | cpu] [--repeats N] [--workers 1 2 4] [--rounds N] [--quick]
    python benchmarks/gpu.py --table FILE.json

For every job, in this process and in turns, after a first turn that is reported apart:
- the plain loop: client after client, records on the GPU, clipped and summed;
- the limit: one vmap over all clients of the round, or over as many as fit into the memory;
- this library's local training with both engines, and its whole round (`DPClient.fit`: train, clip, round to the lattice, add up,
  encode), with the records on the GPU and on the CPU. Records are random numbers.

Then, not for `resnet`, simulated runs (`flower_dp.simulate`) of the same job with one, two and four workers that share the GPU.
They read the MNIST files (`train-images-idx3-ubyte`, ...) in DIR; without DIR they are skipped.

A part that would begin after SECONDS is skipped and named. TF32 is off for all ways, or on with --tf32. The JSON file has all
figures; --table prints it as the tables of docs/benchmarks.md. Without a GPU the program says so and ends with status 0.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

import engines  # noqa: E402
import gpu_runs  # noqa: E402
import rounds  # noqa: E402
from engines import Runner, clients_of, seconds_of  # noqa: E402
from gpu_report import WAYS, machine, table  # noqa: E402

from flower_dp.apps.tasks.models import make  # noqa: E402
from flower_dp.clients import DPClient, FlatModel, Training  # noqa: E402
from flower_dp.clients.training.recipe import parts  # noqa: E402
from flower_dp.core.noise import lattice_step  # noqa: E402
from flower_dp.wire import KEY, Instruction, Promise, ReleaseRequest, ReplyHeader  # noqa: E402

CLIP_NORM = 0.5
# A job takes no further turn after so many seconds.
MOST_SECONDS = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """The clients of one round.

    Attributes:
        job: model, recipe and each client's records.
        size: number of clients.
        population: number of clients of the simulated run; 0 for no such run.
    """

    job: engines.Job
    size: int
    population: int = 0

    def __str__(self) -> str:
        batch = self.job.training.batch_size
        return f"{self.job.name}, {self.size} clients x {self.job.records_per_client} records, batch {batch}"

    def smaller(self) -> "Cohort":
        """Return a cohort that a CPU trains in a second or so."""
        job = replace(self.job, records_per_client=3, training=replace(self.job.training, batch_size=2))
        return replace(self, job=job, size=2, population=self.population and 4)

    def config(self, num_rounds: int, data_dir: str) -> dict[str, Any]:
        """Return the run-config of the simulated run."""
        name, each = self.job.name, self.job.records_per_client
        job = rounds.Job(name=name, model=name, num_clients=self.population, records_per_client=each)
        own = {"cohort-size": self.size, "batch-size": self.job.training.batch_size, "dp-fedavg.delta": 1e-6}
        return job.overrides(num_rounds, data_dir) | own


_JOBS = {job.name: job for job in engines.JOBS}
_BATCH_20 = Training(learning_rate=0.1, batch_size=20)
_LOGISTIC = replace(_JOBS["mlp"], name="logistic", model=lambda: make("logistic", seed=0), records_per_client=20)
# In the order of importance.
COHORTS = (
    Cohort(job=_JOBS["mlp"], size=100, population=1000),
    Cohort(job=replace(_JOBS["cnn"], records_per_client=600, training=_BATCH_20), size=10, population=100),
    Cohort(job=replace(_JOBS["resnet"], records_per_client=100, training=_BATCH_20), size=50),
    Cohort(job=_LOGISTIC, size=100, population=50_000),
)


class Bare:
    """The sum of a cohort's clipped updates without this library's engines, records on the device.

    Attributes:
        at_once: number of clients that the limit trains at once.
    """

    def __init__(self, cohort: Cohort, device: torch.device) -> None:
        clients: list[Any] = clients_of(cohort.job, cohort.size, device)
        self._inputs, self._targets, self._transform = clients[0].inputs, clients[0].targets, clients[0].transform
        self._rows = torch.stack([one.indices for one in clients]).to(device)
        torch.manual_seed(0)
        self._model = FlatModel(cohort.job.model(), device)
        self._start, self._training = self._model.vector.clone(), cohort.job.training
        self._gradients = torch.func.vmap(torch.func.grad(self._loss))
        self.at_once = cohort.size

    def loop(self) -> Tensor:
        """Return the sum, trained client after client."""
        weights, total = self._model.parameters, torch.zeros_like(self._start)
        for rows in self._rows:
            self._model.vector.copy_(self._start)
            for inputs, targets in self._batches(rows):
                gradients = torch.autograd.grad(nn.functional.cross_entropy(self._model.module(inputs), targets), weights)
                with torch.no_grad():
                    torch._foreach_add_(weights, gradients, alpha=-self._training.learning_rate)
            update = self._model.vector - self._start
            total += update * (CLIP_NORM / update.norm()).clamp(max=1.0)
        return total

    def limit(self) -> Tensor:
        """Return the sum, trained at once."""
        while True:
            try:
                return torch.stack([self._together(rows) for rows in self._rows.split(self.at_once)]).sum(0)
            except torch.cuda.OutOfMemoryError:
                if self.at_once == 1:
                    raise
            self.at_once = -(-self.at_once // 2)  # after the error has let its tensors go
            torch.cuda.empty_cache()

    def _together(self, rows: Tensor) -> Tensor:
        weights = self._start.expand(len(rows), -1).clone()
        for inputs, targets in self._batches(rows):
            weights -= self._training.learning_rate * self._gradients(weights, inputs, targets)
        updates = weights - self._start
        return (CLIP_NORM / updates.norm(dim=1)).clamp(max=1.0) @ updates

    def _loss(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        named = dict(zip(self._model.layout.names, parts(weights, self._model.layout), strict=True))
        return nn.functional.cross_entropy(torch.func.functional_call(self._model.module, named, (inputs,)), targets)

    def _batches(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one client [records], or of many [clients, records]."""
        size, dim = self._training.batch_size, rows.ndim - 1
        inputs, targets = self._transform(self._inputs[rows]), self._targets[rows]
        yield from zip(inputs.split(size, dim), targets.split(size, dim), strict=True)


def whole_round(cohort: Cohort, device: torch.device, records_on: torch.device | str) -> Callable[[], None]:
    """Return a round of this library's client, as a worker of a simulation makes it."""
    torch.manual_seed(0)
    clients = {str(place): records for place, records in enumerate(clients_of(cohort.job, cohort.size, records_on))}
    client = DPClient(
        model=cohort.job.model(),
        clients=clients,
        training=cohort.job.training,
        device=device,
        training_engine="auto",
        group_size=cohort.size,
    )
    arrays = [parameter.detach().cpu().numpy().copy() for parameter in client.model.parameters]
    promise = Promise(clip_norm=CLIP_NORM, noise_multiplier=1.0)
    step = lattice_step(promise.noise_scale, clip_norm=CLIP_NORM, dimension=client.model.layout.size)
    ask = ReleaseRequest(promise=promise, placement="central", step=step)
    instruction = Instruction(server_round=1, method="dp-fedavg", clients=tuple(clients), ask=ask)

    def fit() -> None:
        answer = ReplyHeader.from_json(str(client.fit(arrays, {KEY: instruction.to_json()})[2][KEY]), instruction.clients)
        if answer.refused:
            raise RuntimeError(f"{len(answer.refused)} clients sent nothing: {next(iter(answer.refused.values()))}")

    return fit


def measured(cohort: Cohort, device: torch.device, num_repeats: int) -> dict[str, Any]:
    """Return the seconds of a round for every way, and whether the batched engine fell back or changed a bit."""
    places: dict[str, torch.device | str] = {"cpu": "cpu"} if device.type == "cpu" else {"gpu": device, "cpu": "cpu"}
    bare = Bare(cohort, device)
    runners = {place: Runner(cohort.job, cohort.size, device, records_on) for place, records_on in places.items()}
    ways: dict[str, Callable[[], object]] = {"plain_loop": bare.loop, "vmap_limit": bare.limit}
    for engine in ("one_by_one", "batched"):
        ways |= {f"{engine}_{place}": partial(runner.train, engine) for place, runner in runners.items()}
    ways |= {f"round_{place}": whole_round(cohort, device, records_on) for place, records_on in places.items()}
    found = by_turns(ways, device, num_repeats)
    for base in ("plain_loop", "vmap_limit"):
        seconds = found["seconds"]
        found[f"ratio_to_{base}"] = {name: one / seconds[base] for name, one in seconds.items() if base in seconds}
    found |= {"vmap_clients_at_once": bare.at_once, "fell_back": any(runner.fell_back for runner in runners.values())}
    try:
        found["same_bits"] = next(iter(runners.values())).same_bits()
    except Exception as error:
        found["errors"]["same_bits"] = told(error)
    return found


def by_turns(ways: Mapping[str, Callable[[], object]], device: torch.device, num_repeats: int) -> dict[str, Any]:
    """Return the median seconds of every way, the seconds of all its turns, and the errors of ways that fail."""
    began = time.monotonic()
    first: dict[str, float] = {}
    taken: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for turn in range(1 + num_repeats):
        for name in [name for name in ways if name not in errors]:
            try:
                seconds = seconds_of(ways[name], device)
            except Exception as error:
                errors[name] = told(error)
                continue
            if turn == 0:
                first[name] = seconds
            else:
                taken.setdefault(name, []).append(seconds)
        if turn and time.monotonic() - began > MOST_SECONDS:
            break
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {"seconds": medians, "first_seconds": first, "repeats": taken, "errors": errors}


def told(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def shown(found: Mapping[str, Any]) -> str:
    """Return figures in one line, without the figures of each turn."""
    figures = {name: value for name, value in found.items() if name not in ("repeats", "first_seconds")}
    return json.dumps(json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.4g}")))


def measure(cohorts: Sequence[Cohort], plans: Sequence[gpu_runs.Plan], options: argparse.Namespace) -> None:
    """Measure part after part, and write the report after each."""
    began, device = time.monotonic(), torch.device(options.device)
    report: dict[str, Any] = {"machine": machine(device), "tf32": options.tf32, "jobs": {}, "runs": {}, "skipped": []}
    report["settings"] = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print(shown(report["machine"]), flush=True)
    in_turn: list[tuple[Cohort, gpu_runs.Plan | None]] = [(cohort, None) for cohort in cohorts]
    in_turn += [(cohort, plan) for cohort in cohorts if cohort.population for plan in plans]
    for cohort, plan in in_turn:
        label = str(cohort) if plan is None else f"run of {cohort}, workers {plan.workers}"
        if (spent := time.monotonic() - began) > options.budget:
            report["skipped"].append(f"{label} ({spent:.0f} of {options.budget:g} s were over)")
        elif plan is not None and not options.data_dir:
            report["skipped"].append(f"{label} (no --data-dir)")
        elif plan is None:
            try:
                found = measured(cohort, device, options.repeats)
            except Exception as error:
                found = {"seconds": {}, "errors": dict.fromkeys(WAYS, told(error))}
            report["jobs"][label] = found
            print(f"{label}: {shown(found)}", flush=True)
        else:
            try:
                run = gpu_runs.measured(plan, options.rounds, cohort.config(options.rounds, options.data_dir))
            except Exception as error:
                run = asdict(plan) | {"error": told(error)}
            report["runs"].setdefault(str(cohort), []).append(run)
            print(f"{label}: {shown(run)}", flush=True)
        report["total_seconds"] = time.monotonic() - began
        if options.json:
            options.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    print(f"\n{table(report)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all parts that the time allows, or print a report as tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="names of jobs; all by default")
    parser.add_argument("--data-dir", default="", help="folder of the MNIST files, for simulated runs")
    parser.add_argument("--json", type=Path, help="write the report to this file after every part")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds after which no part begins; default: 330")
    parser.add_argument("--tf32", action="store_true", help="let matrix products and convolutions compute in TF32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5, help="number of turns after the first one; default: 5")
    parser.add_argument(
        "--workers", type=int, nargs="*", help="workers of simulated runs; default: 1 2 4 on a GPU, none on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=40, help="rounds of a simulated run")
    parser.add_argument("--quick", action="store_true", help="use tiny cohorts, to try the program")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print this report as tables, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table:
        if not options.table.is_file():
            parser.error(f"--table={options.table}: there is no such file; without a GPU none is written")
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    if unknown := set(options.jobs) - {cohort.job.name for cohort in COHORTS}:
        parser.error(f"unknown jobs {sorted(unknown)}; known are {', '.join(cohort.job.name for cohort in COHORTS)}")
    if options.repeats < 1 or options.rounds < gpu_runs.WARM_UP + 2:
        parser.error(f"--repeats={options.repeats}, --rounds={options.rounds}: must be at least 1 and {gpu_runs.WARM_UP + 2}")
    on_gpu = options.device.startswith("cuda")
    if options.workers is None:
        options.workers = [1, 2, 4] if on_gpu else []
    try:
        plans = gpu_runs.plans(options.workers, os.cpu_count() or 1, gpu=on_gpu)
    except ValueError as error:
        parser.error(str(error))
    if on_gpu and not torch.cuda.is_available():
        print("nothing measured: torch finds no GPU here")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = str(int(options.tf32))  # of the workers of simulated runs
    cohorts = [cohort for cohort in COHORTS if not options.jobs or cohort.job.name in options.jobs]
    measure([cohort.smaller() for cohort in cohorts] if options.quick else cohorts, plans, options)


if __name__ == "__main__":
    main()
