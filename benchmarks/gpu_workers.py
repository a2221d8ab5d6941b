"""One, two and four workers on a GPU: seconds a round, GPU memory of all processes, and its growth over the rounds.

    python benchmarks/gpu_workers.py [--workers 1 2 4] [--rounds N] [--data-dir DIR] [--json FILE]

The job is the MLP 784-256-10 of benchmarks/rounds.py: central DP-FedAvg, 100 of 1,000 clients a round, 60 records each, batches
of 10. Each of n workers gets 1/n of the GPU from Ray, which limits how many there are, not how much memory each takes. The memory
is what `nvidia-smi` says is used on the whole GPU, less what was used before; it is read after a run of a quarter of the rounds,
and after a second run of all of them on the same workers. Without a GPU it says so and ends with status 0.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from round_times import RoundTimes  # noqa: E402

from flower_dp import simulate  # noqa: E402
from flower_dp.running.apps import own_app  # noqa: E402
from flower_dp.simulation import stop_ray  # noqa: E402

WARM_UP = 5
JOB = {
    "method": "dp-fedavg",
    "model": "mlp",
    "partition": "sample",
    "records-per-client": 60,
    "num-clients": 1000,
    "sampling": "fixed-size",
    "cohort-size": 100,
    "dp-fedavg.target-epsilon": 0.0,
    "batch-size": 10,
    "momentum": 0.0,
    "evaluate-every": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One measurement: so many workers, each with a share of the GPU and of the cores."""

    workers: int
    gpus: float
    cpus: float


def plans(workers: Sequence[int], cores: int) -> list[Plan]:
    """Return a plan for each number of workers; together they take one whole GPU, and no more than all cores.

    Raises:
        ValueError: a number below 1.
    """
    if any(number < 1 for number in workers):
        raise ValueError(f"--workers={' '.join(map(str, workers))}: each must be at least 1")
    # Ray counts in ten thousandths; rounded down, so that all of them fit.
    share = {number: int(10_000 / number) / 10_000 for number in workers}
    return [Plan(workers=number, gpus=share[number], cpus=min(1.0, cores * share[number])) for number in workers]


def used_mib(text: str) -> int:
    """Return the memory that `nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits` names for the first GPU."""
    return int(text.split("\n", 1)[0])


def used() -> int:
    """Return the memory of the first GPU that all processes use, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return used_mib(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def why_not() -> str:
    """Return why nothing can be measured here; "" if it can."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    try:
        used()
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        return f"nvidia-smi does not say how much memory is used ({error})"
    return ""


def measured(plan: Plan, num_rounds: int, data_dir: str) -> dict[str, Any]:
    """Return seconds a round and the GPU's memory of one plan: of a quarter of the rounds, then of all, on the same workers."""
    before, memory = used(), []
    with tempfile.TemporaryDirectory() as folder:
        for name, number in (("quarter", max(WARM_UP + 1, num_rounds // 4)), ("all", num_rounds)):
            with RoundTimes(Path(folder, name)) as rounds:
                simulate(
                    own_app().folder,
                    num_nodes=plan.workers,
                    cpus_per_node=plan.cpus,
                    gpus_per_node=plan.gpus,
                    run_config=JOB | {"data-dir": data_dir, "num-rounds": number},
                    output_dir=Path(folder, name),
                    progress=False,
                )
            memory.append(used() - before)
    stop_ray()
    seconds = [after - end for end, after in pairwise(rounds.ends[WARM_UP:])]
    return {"seconds": statistics.median(seconds), "memory_mib": memory[-1], "growth_mib": memory[-1] - memory[0]}


def main() -> None:
    """Measure every plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    chosen = plans(options.workers, os.cpu_count() or 1)
    if options.rounds <= WARM_UP:
        parser.error(f"--rounds={options.rounds}: must be more than {WARM_UP}, which are not counted")
    if why := why_not():
        print(f"nothing measured: {why}")
        return
    results = []
    for plan in chosen:
        results.append(asdict(plan) | measured(plan, options.rounds, options.data_dir))
        one = results[-1]
        print(
            f"{plan.workers} workers with {plan.gpus:g} of the GPU each: {one['seconds']:.3f} s a round, GPU memory "
            f"{one['memory_mib']} MiB, of which {one['growth_mib']} MiB since a quarter of the rounds"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
