"""Do the results of papers with local noise reproduce? FedSGD-DPC (Laplace) and NbAFL on MNIST, DP-PASGD on Adult and Vehicle.

    python benchmarks/papers.py [PAPER ...] [--seeds N] [--data-dir DIR] [--json FILE] [--plot FOLDER]
                                [--most-replies N] [--trial]

One process, one torch thread; with 5 seeds some 15 minutes for the full MNIST, more for DP-PASGD. Prints a Markdown table each:
test loss and accuracy at the end, mean ± standard deviation over the seeds, and differences of loss seed by seed, mean ± standard
error (and in how many seeds they are above 0). Noise is the operating system's, as in any private run: another run gives other
digits.
"""

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import flwr
import paper_dp_pasgd
import paper_fedsgd_dpc
import paper_nbafl
import torch
from points import Measured, measure, quiet, remember_costs, table

from flower_dp.apps.tasks import load_task
from flower_dp.planning.fedsgd_dpc import plan


def run_fedsgd_dpc(options: argparse.Namespace) -> dict[str, Any]:
    """Plan, run, print, and return what goes into the JSON file."""
    train_records = _digits(options)
    num_records = 40 if options.trial else min(1000, train_records // paper_fedsgd_dpc.NUM_CLIENTS)
    constants = paper_fedsgd_dpc.constants_of_table()
    print(f"\n## FedSGD-DPC, Laplace, {num_records} records a client\n")
    print("constants that fit Table I: gamma = {:.3g}, C1/C2 = {:.4g}, C3/C2 = {:.4g} (epsilon 1)".format(*constants))
    # A trial plans for the full size, to have points with more than a round.
    plans = {
        epsilon: plan(paper_fedsgd_dpc.table_problem(constants, epsilon, 1000 if options.trial else num_records))
        for epsilon in paper_fedsgd_dpc.EPSILONS
    }
    estimated = paper_fedsgd_dpc.plans_of_data(num_records, options.data_dir)
    for what, answers in (("the constants of Table I", plans), ("constants estimated from the data", estimated)):
        for epsilon, answer in answers.items():
            best, start = answer.best, answer.problem.initial_distance
            print(
                f"planned from {what}, epsilon={epsilon:g}: b={best.cohort_size}, T={best.num_rounds} "
                f"(bound {best.bound:.4g}; {start:.4g} before training; lambda/mu = "
                f"{answer.problem.smoothness / answer.problem.strong_convexity:.3g})"
            )
    points, left_out = paper_fedsgd_dpc.points(num_records, options.most_replies, plans, estimated)
    results = [measure(point, options.seeds, options.data_dir) for point in points]
    print(f"left out, more than {options.most_replies} replies in a run: {'; '.join(left_out) or 'nothing'}\n")
    print(paper_fedsgd_dpc.report(results), "\n")
    if options.plot:
        paper_fedsgd_dpc.draw(results, options.plot / "fedsgd-dpc.png")
    lines = paper_fedsgd_dpc.verdicts(results)
    print("\n".join(lines))
    return {
        "constants": constants,
        "estimated": {f"{epsilon:g}": answer.to_dict() for epsilon, answer in estimated.items()},
        "planned": {f"{epsilon:g}": answer.to_dict() for epsilon, answer in plans.items()},
        "left_out": left_out,
        "verdicts": lines,
        "points": _plain(results),
    }


def run_nbafl(options: argparse.Namespace) -> dict[str, Any]:
    """Run, print, and return what goes into the JSON file."""
    train_records = _digits(options)
    num_records = min(100, train_records // max(paper_nbafl.CLIENTS))
    points = paper_nbafl.points(num_records, 0.1 if options.trial else 1.0)
    results = [measure(point, options.seeds, options.data_dir) for point in points]
    print(f"\n## NbAFL, {num_records} records a client\n\n{paper_nbafl.report(results)}\n")
    if options.plot:
        paper_nbafl.draw(results, options.plot / "nbafl.png")
    lines = paper_nbafl.verdicts(results)
    print("\n".join(lines))
    return {"verdicts": lines, "points": _plain(results)}


def run_dp_pasgd(options: argparse.Namespace) -> dict[str, Any]:
    """Run, plan, print, and return what goes into the JSON file."""
    points = paper_dp_pasgd.points(options.data_dir)
    results = [measure(point, options.seeds, options.data_dir) for point in points]
    planned = paper_dp_pasgd.plans(options.data_dir)
    print(f"\n## DP-PASGD\n\n{paper_dp_pasgd.report(results)}\n\n{table(planned)}\n")
    lines = paper_dp_pasgd.verdicts(results)
    print("\n".join(lines))
    return {"verdicts": lines, "planned": planned, "points": _plain(results)}


def _digits(options: argparse.Namespace) -> int:
    """Print how many digits of MNIST there are; return the number to train on."""
    task = load_task("mnist", options.data_dir)
    print(f"data: {len(task.train_labels)} training and {len(task.test_labels)} test records of MNIST")
    return len(task.train_labels)


def _plain(results: list[Measured]) -> list[dict[str, Any]]:
    """Return the results without infinities, which JSON does not have."""
    text = json.dumps([asdict(result) for result in results])
    return list(json.loads(text, parse_constant=lambda word: word))


def main() -> None:
    """Run the papers asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", metavar="PAPER", help="fedsgd-dpc, nbafl, dp-pasgd; all by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", default="", help="folder of MNIST (by default the embedded digits), Adult, Vehicle")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw fedsgd-dpc.png and nbafl.png there")
    parser.add_argument("--most-replies", type=int, default=500, help="FedSGD-DPC: leave out points with more replies in a run")
    parser.add_argument("--trial", action="store_true", help="small sizes, to see that the program works")
    options = parser.parse_args()
    jobs = {"fedsgd-dpc": run_fedsgd_dpc, "nbafl": run_nbafl, "dp-pasgd": run_dp_pasgd}
    if unknown := set(options.papers) - set(jobs):
        parser.error(f"unknown papers {sorted(unknown)}; known are {', '.join(jobs)}")
    torch.set_num_threads(1)
    quiet()
    remember_costs()
    started = time.monotonic()
    about = {
        "machine": f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} cores, one used",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}",
        "seeds": f"0 to {options.seeds - 1}",
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    results: dict[str, Any] = dict(about)
    for name, job in jobs.items():
        if options.papers and name not in options.papers:
            continue
        results[name] = job(options)
        results["seconds"] = round(time.monotonic() - started)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2, allow_nan=False))
    print(f"\n{results.get('seconds', 0) / 60:.1f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
