"""Measure simulated runs whose workers share one GPU: seconds per round, and GPU memory. A part of benchmarks/gpu.py."""

import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from round_times import RoundTimes

from flower_dp import simulate
from flower_dp.simulation import stop_ray

WARM_UP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A number of workers, each with a share of the GPU and of the cores."""

    workers: int
    gpus: float
    cpus: float


def plans(workers: Sequence[int], cores: int, *, gpu: bool = True) -> list[Plan]:
    """Return a plan for each number of workers, which share one GPU, if there is one, and at most all cores.

    Raises:
        ValueError: if a number is below 1.
    """
    if any(number < 1 for number in workers):
        raise ValueError(f"--workers={' '.join(map(str, workers))}: each must be at least 1")
    # Ray counts in ten thousandths; rounding down makes all workers fit.
    share = {number: int(10_000 / number) / 10_000 for number in workers}
    return [Plan(workers=one, gpus=share[one] if gpu else 0.0, cpus=min(1.0, cores * share[one])) for one in workers]


def used_mib() -> int:
    """Return the memory that all processes use on the first GPU, in MiB; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free) // 2**20


def measured(plan: Plan, num_rounds: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return seconds per round and GPU memory of a plan, from a quarter of the rounds and then all, on the same workers.

    The memory is the increase over the memory in use before.
    """
    gc.collect()
    torch.cuda.empty_cache()
    before, memory = used_mib(), []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, number in (("quarter", max(WARM_UP + 1, num_rounds // 4)), ("all", num_rounds)):
                with RoundTimes(Path(folder, name)) as times:
                    simulate(
                        "mnist",
                        num_nodes=plan.workers,
                        cpus_per_node=plan.cpus,
                        gpus_per_node=plan.gpus,
                        run_config={**config, "num-rounds": number},
                        output_dir=Path(folder, name),
                        progress=False,
                    )
                memory.append(used_mib() - before)
    finally:
        stop_ray()
    seconds = [after - end for end, after in pairwise(times.ends[WARM_UP:])]
    of_memory = {"memory_mib": memory[-1], "growth_mib": memory[-1] - memory[0]}
    return asdict(plan) | {"seconds": statistics.median(seconds), "repeats": seconds} | of_memory
