"""Test whether NbAFL's final loss falls with epsilon and with N, and whether the best T is interior.

All settings were fixed before the first full run. From the paper: MLP 784-256-10, N = 50, T = 25, 100 records per client (as many
as the embedded digits allow without a folder of the full set), C = 20, delta 0.01, epsilon 50, 60, 100. From the preset: L = 1,
mu = 0.1, 2 local epochs in batches of 10, learning rate 0.02 (the paper has 0.002 and gives no number of local steps).
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from points import LOOKS, Measured, Point, Row, difference, panels, spread, table

from flower_dp.privacy.statement import PrivacyStatement

PRESET = "mnist-nbafl"
BASE = {"epsilon": 50.0, "N": 50, "T": 25}
EPSILONS = (50.0, 60.0, 100.0, math.inf)
CLIENTS = (20, 50, 100)
ROUNDS = (2, 5, 10, 25, 50)


def points(num_records: int) -> list[Point]:
    """Return the points of the three sweeps, which all contain the base."""
    grid = {"epsilon": EPSILONS, "N": CLIENTS, "T": ROUNDS}
    chosen = [BASE, *(BASE | {key: value} for key, values in grid.items() for value in values)]
    unique = list({tuple(arguments.values()): arguments for arguments in chosen}.values())
    return [
        Point(
            preset=PRESET,
            settings={
                "nbafl.paper-epsilon": arguments["epsilon"],
                "num-clients": arguments["N"],
                "num-rounds": arguments["T"],
                "nbafl.num-replies": arguments["T"],
                "records-per-client": num_records,
            },
            arguments=arguments,
            numbers=_numbers,
        )
        for arguments in unique
    ]


def _numbers(strategy: Any, statement: PrivacyStatement) -> Row:
    # A run without noise has no adversaries in its statement: it is not private against any.
    tight = {adversary.name: adversary.epsilon for adversary in statement.adversaries}
    return {
        "uplink std": strategy.rules.uplink_noise_std,
        "downlink std": strategy.rules.downlink_noise_std,
        "uplink": tight.get("uplink", statement.epsilon),
        "downlink": tight.get("downlink", statement.epsilon),
        "paper valid": None if statement.paper_epsilon is None else statement.paper_epsilon.valid,
    }


def sweep(results: list[Measured], key: str) -> list[Measured]:
    """Return the results that differ from the base only in one setting, in the order of its values."""
    others = {name: value for name, value in BASE.items() if name != key}
    found = [r for r in results if all(r.arguments[name] == value for name, value in others.items())]
    return sorted(found, key=lambda result: float(result.arguments[key]))


def report(results: list[Measured]) -> str:
    """Return the table of the three sweeps."""
    rows = []
    for key in BASE:
        for result in sweep(results, key):
            numbers = result.numbers
            rows.append(
                {
                    "sweep": key.replace("epsilon", "ε"),
                    "paper's ε": f"{result.arguments['epsilon']:g}" + (" (not valid)" if numbers["paper valid"] is False else ""),
                    "N": result.arguments["N"],
                    "T": result.arguments["T"],
                    "uplink std": numbers["uplink std"],
                    "downlink std": numbers["downlink std"],
                    "loss": spread(result.losses),
                    "accuracy": spread(result.accuracies),
                    "proved ε, uplink": numbers["uplink"],
                    "proved ε, downlink": numbers["downlink"],
                }
            )
    return table(rows)


def verdicts(results: list[Measured]) -> list[str]:
    """Return for each sweep the direction of the loss, seed by seed."""
    lines = []
    for key in ("epsilon", "N"):
        row = sweep(results, key)
        falls = all(before.loss > after.loss for before, after in pairwise(row))
        steps = ", ".join(
            f"{before.arguments[key]:g} less {after.arguments[key]:g}: {difference(before, after)}"
            for before, after in pairwise(row)
        )
        lines.append(f"loss falls with {key}: {'yes' if falls else 'no'} ({steps})")
    row = sweep(results, "T")
    best = min(row, key=lambda result: result.loss)
    inside = best not in (row[0], row[-1])
    against = ", ".join(f"T={other.arguments['T']}: {difference(other, best)}" for other in row if other is not best)
    lines.append(f"an interior best T: {'yes' if inside else 'no'}, T={best.arguments['T']} (loss more than there: {against})")
    return lines


def draw(results: list[Measured], path: Path) -> None:
    """Draw the test loss over the paper's epsilon, N and T, with a horizontal line for the loss without noise."""
    titles = [", ".join(f"{name} = {value:g}" for name, value in BASE.items() if name != key) for key in BASE]
    with panels(path, [title.replace("epsilon", "ε") for title in titles], "test loss") as every:
        for axes, key in zip(every, BASE, strict=True):
            row = sweep(results, key)
            level = next((result for result in row if math.isinf(float(result.arguments[key]))), None)
            line = [result for result in row if result is not level]
            at = [float(result.arguments[key]) for result in line]
            axes.errorbar(at, [r.loss for r in line], [r.loss_spread for r in line], **LOOKS[0])
            if level is not None:
                axes.axhline(level.loss, color="black", linestyle="--", label="no noise")
                axes.legend(frameon=False)
            axes.set_xscale("log")
            axes.set_xticks(at, [f"{value:g}" for value in at])
            axes.minorticks_off()
            axes.set_xlabel({"epsilon": "ε of the paper, not valid", "N": "N, clients", "T": "T, rounds"}[key])
