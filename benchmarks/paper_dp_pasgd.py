"""Compare DP-PASGD (tau = 10) with DP-SGD (tau = 1) at equal cost and privacy, and find the best tau.

Settings were fixed after a trial with one seed. From the paper: Adult with 16 devices, by education (Adult-1) and i.i.d.
(Adult-2), logistic regression on the categorical features; Vehicle, 23 sensors, linear SVM; 80/10/10 split of every device; a
round costs 100 and a step 1, at most 1,000; epsilon 10, delta 1e-4, noise by the paper's eq. 9. The paper does not give its
learning rate, so all rates of a grid are run. Batches have 64 records, or all records of a smaller device; gradients are clipped
to norm 1. The best model by validation loss is kept.
"""

import itertools
from typing import Any

from points import Measured, Point, Row, config_of, difference, records, spread, table

from flower_dp.apps.pilot import pilot
from flower_dp.planning.dp_pasgd import plan
from flower_dp.planning.planner import ProblemError
from flower_dp.privacy.statement import PrivacyStatement

# Name in the table: preset, partition.
DATA = {
    "Adult-1": ("adult-dp-pasgd", "natural"),
    "Adult-2": ("adult-dp-pasgd", "iid"),
    "Vehicle, sensors": ("vehicle-dp-pasgd", "natural"),
    "Vehicle, i.i.d.": ("vehicle-dp-pasgd", "iid"),
}
LEARNING_RATES = {1: (0.1, 0.3, 1.0, 3.0), 10: (0.1, 0.3, 1.0)}
# The grid of tau is run at one learning rate, on the data on which no device has fewer than 41 records.
GRID, GRID_RATE, GRID_DATA = (1, 2, 5, 10, 20), 0.3, ("Adult-1", "Adult-2", "Vehicle, i.i.d.")
PER_AGGREGATION, MAX_COST, BATCH, CLIP_NORM = 100, 1000, 64, 1.0


def points(data_dir: str) -> list[Point]:
    """Return all points; those of the claim come first."""
    chosen = [(name, tau, rate) for name in DATA for tau, rates in LEARNING_RATES.items() for rate in rates]
    chosen += [(name, tau, GRID_RATE) for name in GRID_DATA for tau in GRID]
    sizes = {name: batch_sizes(name, data_dir) for name in DATA}
    return [_point(name, tau, rate, sizes[name]) for name, tau, rate in dict.fromkeys(chosen)]


def _point(name: str, tau: int, rate: float, sizes: str) -> Point:
    preset, partition = DATA[name]
    return Point(
        preset=preset,
        settings={
            "partition": partition,
            "learning-rate": rate,
            "num-rounds": MAX_COST // (PER_AGGREGATION + tau),
            "dp-pasgd.num-local-steps": tau,
            "dp-pasgd.client-batch-sizes": sizes,
            "dp-pasgd.batch-sampling": "fixed-size",
            "dp-pasgd.clip-norm": CLIP_NORM,
            "dp-pasgd.calibration": "zcdp",
            "dp-pasgd.max-resource-cost": float(MAX_COST),
        },
        arguments={"data": name, "tau": tau, "learning rate": rate},
        numbers=numbers,
    )


def batch_sizes(name: str, data_dir: str, batch: int = BATCH) -> str:
    """Return every device's batch size, at most `batch`.

    A device has the same number of records for every seed; in the i.i.d. data, up to one more or less.
    """
    preset, partition = DATA[name]
    dealt = records.deal(records.config_of(config_of(preset, {"partition": partition, "data-dir": data_dir})))
    return ",".join(str(min(batch, len(own))) for own in dealt.clients.values())


def numbers(strategy: Any, statement: PrivacyStatement) -> Row:
    """Return the table's numbers of a run."""
    return {
        "rounds": statement.num_charged_rounds,
        "cost": max(strategy.rules.costs(strategy.charges).values()),
        "proved epsilon": statement.epsilon,
        "paper epsilon": None if statement.paper_epsilon is None else statement.paper_epsilon.epsilon,
        "largest noise std": statement.noise["max_noise_std_of_a_mean_gradient"],
    }


def plans(data_dir: str) -> list[Row]:
    """Return the planner's answers for the data of the grid, at both smaller learning rates."""
    rows = []
    for name, rate in itertools.product(GRID_DATA, (0.1, GRID_RATE)):
        preset, partition = DATA[name]
        settings = {"partition": partition, "data-dir": data_dir, "learning-rate": rate}
        settings["dp-pasgd.client-batch-sizes"] = batch_sizes(name, data_dir)
        given: dict[str, object] = {"clip_norm": CLIP_NORM}
        try:
            answer = plan({**pilot("dp-pasgd", config_of(preset, settings), given=given).values, **given})
        except ProblemError as error:
            found = (str(error).split(": ", 1)[1], "", "")
        else:
            proved = next(one for one in answer.candidates if one.name == "best for the mean of the iterates")
            of_proved = f"{proved.steps_per_round:g} (K = {proved.num_steps:g})"
            found = (answer["steps_per_round"], answer["num_steps"], of_proved)
        row = {"data": name, "learning rate": rate}
        rows.append(row | dict(zip(("planner's tau", "K", "tau of the bound that is proved"), found, strict=True)))
    return rows


def report(results: list[Measured]) -> str:
    """Return the table of all points."""
    rows = [
        {
            **result.arguments,
            "rounds": result.numbers["rounds"],
            "cost": f"{result.numbers['cost']:.0f}",
            "loss": spread(result.losses),
            "accuracy": spread(result.accuracies),
            "largest noise std": f"{result.numbers['largest noise std']:.3g}",
            "proved ε": f"{result.numbers['proved epsilon']:.3f}",
        }
        for result in results
    ]
    return table(rows)


def verdicts(results: list[Measured]) -> list[str]:
    """Return for every data set whether the claim holds, and the grid's best tau; differences of loss are seed by seed."""
    lines = []
    for name in DATA:
        one, ten = ([r for r in results if r.arguments["data"] == name and r.arguments["tau"] == tau] for tau in (1, 10))
        for rate in LEARNING_RATES[10]:
            pair: list[Any] = [next(r for r in row if r.arguments["learning rate"] == rate) for row in (one, ten)]
            lines.append(f"{name}: loss of DP-SGD less that of tau = 10, both at learning rate {rate:g}: {difference(*pair)}")
        best = [min(row, key=lambda result: result.loss) for row in (one, ten)]
        rates = " and ".join(f"{result.arguments['learning rate']:g}" for result in best)
        lines.append(f"{name}: the same, each at its own best learning rate ({rates}): {difference(*best)}")
    for name in GRID_DATA:
        row = [
            r
            for r in results
            if r.arguments["data"] == name and r.arguments["learning rate"] == GRID_RATE and r.arguments["tau"] in GRID
        ]
        row.sort(key=lambda result: int(result.arguments["tau"]))
        best_of_grid = min(row, key=lambda result: result.loss)
        inside = best_of_grid not in (row[0], row[-1])
        others = ", ".join(f"tau={r.arguments['tau']}: {difference(r, best_of_grid)}" for r in row if r is not best_of_grid)
        found = f"{'yes' if inside else 'no'}, tau={best_of_grid.arguments['tau']}"
        lines.append(f"{name}: an interior best tau: {found} (loss more than there: {others})")
    return lines
