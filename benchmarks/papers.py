"""Reproduce results of papers with local noise: FedSGD-DPC (Laplace) and NbAFL on MNIST, DP-PASGD on Adult and Vehicle.

    python benchmarks/papers.py [PAPER ...] [--seeds N] [--data-dir DIR] [--plot FOLDER]
                                [--most-replies N]

One process, one torch thread; with 5 seeds some 15 minutes for the full MNIST, more for DP-PASGD. The program prints one Markdown
table per paper: final test loss and accuracy, mean ± standard deviation over the seeds, and differences of loss seed by seed,
mean ± standard error (and in how many seeds they are above 0). The operating system's random numbers give the noise, as in any
private run, so every run gives other digits.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import flwr
import paper_dp_pasgd
import paper_fedsgd_dpc
import paper_nbafl
import torch
from points import measure, quiet, remember_costs, table

from flower_dp.apps.tasks import load_task
from flower_dp.planning.fedsgd_dpc import plan


def run_fedsgd_dpc(options: argparse.Namespace) -> None:
    """Plan, run, and print FedSGD-DPC's table."""
    num_records = min(1000, _digits(options) // paper_fedsgd_dpc.NUM_CLIENTS)
    constants = paper_fedsgd_dpc.constants_of_table()
    print(f"\n## FedSGD-DPC, Laplace, {num_records} records per client\n")
    print("constants that fit Table I: gamma = {:.3g}, C1/C2 = {:.4g}, C3/C2 = {:.4g} (epsilon 1)".format(*constants))
    plans = {
        epsilon: plan(paper_fedsgd_dpc.table_problem(constants, epsilon, num_records)) for epsilon in paper_fedsgd_dpc.EPSILONS
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
    print(f"skipped, more than {options.most_replies} replies in a run: {'; '.join(left_out) or 'nothing'}\n")
    print(paper_fedsgd_dpc.report(results), "\n")
    if options.plot:
        paper_fedsgd_dpc.draw(results, options.plot / "fedsgd-dpc.png")
    print("\n".join(paper_fedsgd_dpc.verdicts(results)))


def run_nbafl(options: argparse.Namespace) -> None:
    """Run, and print NbAFL's table."""
    num_records = min(100, _digits(options) // max(paper_nbafl.CLIENTS))
    results = [measure(point, options.seeds, options.data_dir) for point in paper_nbafl.points(num_records)]
    print(f"\n## NbAFL, {num_records} records per client\n\n{paper_nbafl.report(results)}\n")
    if options.plot:
        paper_nbafl.draw(results, options.plot / "nbafl.png")
    print("\n".join(paper_nbafl.verdicts(results)))


def run_dp_pasgd(options: argparse.Namespace) -> None:
    """Run, plan, and print DP-PASGD's table."""
    results = [measure(point, options.seeds, options.data_dir) for point in paper_dp_pasgd.points(options.data_dir)]
    planned = table(paper_dp_pasgd.plans(options.data_dir))
    print(f"\n## DP-PASGD\n\n{paper_dp_pasgd.report(results)}\n\n{planned}\n")
    print("\n".join(paper_dp_pasgd.verdicts(results)))


def _digits(options: argparse.Namespace) -> int:
    """Print the numbers of MNIST's records; return the number of training records."""
    task = load_task("mnist", options.data_dir)
    print(f"data: {len(task.train_labels)} training and {len(task.test_labels)} test records of MNIST")
    return len(task.train_labels)


def main() -> None:
    """Run the chosen papers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", metavar="PAPER", help="fedsgd-dpc, nbafl or dp-pasgd; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", default="", help="folder of MNIST (default: the embedded digits), Adult, Vehicle")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="folder for fedsgd-dpc.png and nbafl.png")
    parser.add_argument("--most-replies", type=int, default=500, help="FedSGD-DPC: skip points with more replies")
    options = parser.parse_args()
    jobs = {"fedsgd-dpc": run_fedsgd_dpc, "nbafl": run_nbafl, "dp-pasgd": run_dp_pasgd}
    if unknown := set(options.papers) - set(jobs):
        parser.error(f"unknown papers {sorted(unknown)}; known are {', '.join(jobs)}")
    torch.set_num_threads(1)
    quiet()
    remember_costs()
    started = time.monotonic()
    print(f"machine: {platform.platform()}, {platform.machine()}, {os.cpu_count()} cores, one used")
    print(f"versions: Python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}")
    print(f"seeds: 0 to {options.seeds - 1}")
    for name, job in jobs.items():
        if not options.papers or name in options.papers:
            job(options)
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
