"""Measure the cost of few bits: DP-FedPAQ on HET_MNIST(2) with ternary messages (s = 1), s = 10 and no quantization.

    python benchmarks/paper_dp_fedpaq.py [--seeds N] [--data-dir DIR]

All settings were fixed before the first full run. From the paper: logistic regression, N = 100, M = 10, K = 100 rounds, C = 1,
delta 1e-4, eta_k = 0.1 / (1 + kE/100), gamma = 0.2 (b = 12 of 600 records with the full MNIST). Without noise with the paper's E
= 10 and `clip-update`, S = 0.6. With noise E = 1 on all 120 records and `per-step`, 2 eta C / b: E = 10 steps have the
sensitivity of more than 100 such records, which no budget here covers.

The program prints a Markdown table: mean ± standard deviation over the seeds, the size of a client's message, and the difference
of loss to no quantization, seed by seed. The operating system's random numbers give the noise, so every run gives other digits.
"""

import argparse
import math

import torch
from points import Measured, Point, Row, difference, measure, quiet, spread, table

from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.strategy import DPStrategy

LEVELS = (1, 10, 0)
EPSILONS = (10.0, 100.0, math.inf)
ROUNDS = 100


def points(full: bool) -> list[Point]:
    """Return the points: every budget with every number of levels, without quantization last."""
    chosen = 120 if full else 8
    return [
        Point(
            preset="mnist-dp-fedpaq",
            settings={
                "num-clients": 100,
                "partition": "het-mnist",
                "sampling": "fixed-size",
                "cohort-size": 10,
                "num-rounds": ROUNDS,
                "learning-rate": 0.1,
                "dp-fedpaq.epsilon": epsilon,
                "dp-fedpaq.clip-norm": 1.0,
                "dp-fedpaq.decay-iterations": 100.0,
                "dp-fedpaq.quantization-levels": levels,
                "dp-fedpaq.num-replies": ROUNDS,
                **_steps(epsilon, chosen),
            },
            arguments={"epsilon": epsilon, "s": levels or "none"},
            numbers=_numbers,
        )
        for epsilon in EPSILONS
        for levels in LEVELS
    ]


def _steps(epsilon: float, chosen: int) -> Row:
    if math.isinf(epsilon):
        steps = min(10, chosen)
        return {
            "dp-fedpaq.num-local-steps": steps,
            "batch-size": chosen // steps,
            "dp-fedpaq.sensitivity": "clip-update",
            "dp-fedpaq.update-clip-norm": 0.6,
        }
    return {
        "dp-fedpaq.num-local-steps": 1,
        "batch-size": chosen,
        "dp-fedpaq.sensitivity": "per-step",
        "dp-fedpaq.update-clip-norm": 0.0,
        "dp-fedpaq.num-replies": 0,
    }


def _numbers(strategy: DPStrategy, statement: PrivacyStatement) -> Row:
    bytes_each = [report.bytes_per_client for report in strategy.rounds]
    return {
        "epsilon": statement.epsilon,
        "noise std": statement.noise.get("min_noise_std_of_an_update_of_round_1", 0.0),
        "bits": 8 * sum(bytes_each) / len(bytes_each) / 7840,
    }


def rows(results: list[Measured]) -> list[Row]:
    """Return the table's rows; every budget's last point is the one without quantization."""
    made = []
    for index, result in enumerate(results):
        plain = results[index // len(LEVELS) * len(LEVELS) + len(LEVELS) - 1]
        made.append(
            {
                "epsilon": f"{result.arguments['epsilon']:g}",
                "s": result.arguments["s"],
                "noise std of an update": result.numbers["noise std"],
                "bits a coordinate": result.numbers["bits"],
                "loss": spread(result.losses),
                "accuracy": spread(result.accuracies),
                "loss - none": "" if result is plain else difference(result, plain),
            }
        )
    return made


def main() -> None:
    """Run all points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", default="", help="folder of the full MNIST; the embedded digits by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    print(table(rows([measure(point, options.seeds, options.data_dir) for point in points(bool(options.data_dir))])))


if __name__ == "__main__":
    main()
