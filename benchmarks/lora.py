"""Measure fine-tuning with client-level privacy: perplexity of examples/lora before, without noise, and at epsilon 8 and 2.

    python benchmarks/lora.py FOLDER [--seeds N] [--epsilons E [E ...]] [--set KEY=VALUE ...]

The program runs `examples/lora` with DP-FedAvg and DP-FedSAM, both with adaptive clipping and central noise, by
`flower_dp.simulate`: one run after another, one worker per core, over several seeds. FOLDER gets one run folder per run. To
resume, repeat the command: it skips finished runs and resumes an interrupted one. A seed governs the initial adapters and the
order of records. Text and base model are the same in all runs; noise and cohorts are new in each. The perplexity is the last
model's, on public sentences in the clients' style.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from points import quiet, table

import flower_dp
from flower_dp.running.apps import resolve

APP = Path(__file__).resolve().parent.parent / "examples" / "lora"
METHODS = {"dp-fedavg": "DP-FedAvg", "dp-fedsam": "DP-FedSAM"}


def settings_of(method: str, epsilon: float, changes: list[str]) -> dict[str, Any]:
    """Return the settings of a run; epsilon 0 means a run without noise."""
    noise: dict[str, Any] = {f"{method}.epsilon": epsilon}
    if not epsilon:
        noise |= {f"{method}.noise-multiplier": 0.0, f"{method}.target-epsilon": 0.0}
    return {"method": method, **noise, **resolve(str(APP), changes).overrides}


def has_ended(folder: Path) -> bool:
    """Return whether a folder has a finished run."""
    described = folder / "model.json"
    return described.is_file() and "unfinished" not in json.loads(described.read_text())


def perplexities(folder: Path) -> tuple[float, float, float, float]:
    """Return perplexity before and after a run, the last clip norm, and the statement's epsilon."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [line["perplexity"] for line in lines if "perplexity" in line]
    guarantee = json.loads((folder / "statement.json").read_text())["guarantee"]
    epsilon = guarantee["epsilon"] if guarantee["private"] else float("inf")
    return values[0], values[-1], lines[-1]["clip-norm"], epsilon


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation over the seeds."""
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


def main() -> None:
    """Make the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.0, 8.0, 2.0], help="target epsilons; 0: without noise")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="setting of every run")
    options = parser.parse_args()
    quiet()
    rows: list[dict[str, Any]] = []
    for epsilon in options.epsilons:
        for method, name in METHODS.items():
            measured = []
            for seed in range(options.seeds):
                folder = options.folder / f"{method}-{epsilon:g}-{seed}"
                if not has_ended(folder):
                    started, goes_on = time.monotonic(), (folder / "checkpoint").is_dir()
                    place: dict[str, Any] = {"resume": folder} if goes_on else {"output_dir": folder}
                    config = settings_of(method, epsilon, options.changes)
                    flower_dp.simulate(APP, run_config=config, seed=seed, progress=False, **place)
                    print(f"{folder.name}: {time.monotonic() - started:.0f} s", flush=True)
                measured.append(perplexities(folder))
            before, after, clips, epsilons = (list(values) for values in zip(*measured, strict=True))
            if not rows:
                rows.append(
                    {"method": "the base, before any round", "epsilon": "0", "perplexity": spread(before), "clip norm": ""}
                )
            noise = f"{max(epsilons):.3g}" if epsilon else "no noise"
            rows.append(
                {"method": name, "epsilon": noise, "perplexity": spread(after), "clip norm": f"{statistics.fmean(clips):.2g}"}
            )
    print(table(rows))


if __name__ == "__main__":
    main()
