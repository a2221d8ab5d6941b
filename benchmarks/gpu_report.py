"""The report of benchmarks/gpu.py: the machine, and tables in Markdown."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from flower_dp.simulation.cluster import installed

REPOSITORY = Path(__file__).resolve().parent.parent
WAYS = {
    "plain_loop": "plain PyTorch loop, client by client",
    "vmap_limit": "one vmap over all clients (the limit)",
    **{
        f"{way}_{place}": f"{label}, records on the {place.upper()}"
        for way, label in (("one_by_one", "`one_by_one`"), ("batched", "`batched`"), ("round", "whole round"))
        for place in ("gpu", "cpu")
    },
}
NOTE = (
    "In parentheses: the ratios to the plain loop and to the limit. Of a simulated run: the GPU's memory that all its processes "
    "take, and its growth from a quarter of the rounds to the end of a second run."
)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware and the versions of a measurement."""
    cuda = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if cuda else "no GPU",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] if cuda else "",
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": installed()
        | {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda or "none"},
        "commit": _output("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _output(*command: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def table(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown: a paragraph, a table of the parts in one process, and a table of the simulated runs."""
    made, jobs, runs = report["machine"], report["jobs"], report["runs"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if name != "flower-dp")
    lines = [
        f"Measured on {made['date']} with `python benchmarks/gpu.py` ({made['card']}, driver {made['driver'] or 'unknown'}, "
        f"{made['cores']} cores, {versions}, commit {made['commit'] or 'unknown'}; TF32 {'on' if report['tf32'] else 'off'}).",
        *_head("seconds a round", jobs),
    ]
    for way, label in WAYS.items():
        if any(way in job["seconds"] or way in job["errors"] for job in jobs.values()):
            lines.append(_row(label, [_cell(job, way) for job in jobs.values()]))
    for label, key in (("`batched` fell back", "fell_back"), ("the same bits alone and in a group", "same_bits")):
        lines.append(_row(label, [{True: "yes", False: "no"}.get(job.get(key), "-") for job in jobs.values()]))
    numbers = list(dict.fromkeys(one["workers"] for plans in runs.values() for one in plans))
    if numbers:
        lines += _head("simulated run", [f"{number} worker{'s' if number > 1 else ''}" for number in numbers])
    for name, plans in runs.items():
        cells = {one["workers"]: _run_cell(one) for one in plans}
        lines.append(_row(name, [cells.get(number, "-") for number in numbers]))
    skipped = [f"Not measured: {'; '.join(report['skipped'])}."] if report["skipped"] else []
    return "\n".join([*lines, "", NOTE, *skipped])


def _head(first: str, others: Any) -> list[str]:
    return ["", _row(first, others), f"|---{'|---' * len(others)}|"]


def _row(first: str, others: Any) -> str:
    return f"| {' | '.join([first, *others])} |"


def _cell(job: Mapping[str, Any], way: str) -> str:
    if way not in job["seconds"]:
        return "failed" if way in job["errors"] else "-"
    ratios = [job[f"ratio_to_{base}"].get(way) for base in ("plain_loop", "vmap_limit")]
    return f"{job['seconds'][way]:.3g} ({', '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in ratios)})"


def _run_cell(run: Mapping[str, Any]) -> str:
    return "failed" if "error" in run else f"{run['seconds']:.3g} s ({run['memory_mib']} MiB, {run['growth_mib']:+d})"
