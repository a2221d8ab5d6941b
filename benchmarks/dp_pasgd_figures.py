"""Test whether DP-PASGD's best tau moves with epsilon and the resource limit as the paper says: Figs. 3 to 6.

    python benchmarks/dp_pasgd_figures.py RESULTS.jsonl --data-dir DIR [--seeds N] [--parts PART ...] [--costs COST ...]
                                          [--plot FILE.png] [--no-runs]

Four parts: `vehicle` and `adult`, both i.i.d., have the grid of tau at epsilon 1, 2, 4 and 10 and a cost of 200, 500 and 1,000,
with the paper's noise (eq. 9); `noise` has tau = 10 with `exact` noise and with Poisson batches; `poisson` has the grid of tau
with both. Settings that are not named here are those of paper_dp_pasgd.py. Each run is a line of RESULTS.jsonl, written when it
ends. To resume, repeat the command: it skips the runs that are in the file. One process, one torch thread. A seed governs data
split and initial model; noise and batches are never seeded.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import points
import torch
from paper_dp_pasgd import BATCH, CLIP_NORM, DATA, PER_AGGREGATION, batch_sizes, numbers
from points import LOOKS, Point, Row, deviation, panels, quiet, remember_costs, run_once, spread, table

EPSILONS, COSTS, TAUS, RATE = (1.0, 2.0, 4.0, 10.0), (1000, 500, 200), (1, 2, 5, 10, 20), 0.3
# Devices of Vehicle train on 65 records: a Poisson batch of 64 would be nearly all of them.
ADULT, VEHICLE, VEHICLE_BATCH = "Adult-2", "Vehicle, i.i.d.", 16
TAU_OF_NOISE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point of the grid; its attributes are keys of a line of the results."""

    data: str
    epsilon: float
    tau: int
    cost: int = COSTS[0]
    rate: float = RATE
    batch: int = BATCH
    sampling: str = "fixed-size"
    calibration: str = "zcdp"

    def point(self, sizes: str) -> Point:
        """Return the settings; the number of rounds is what the cost allows."""
        preset, partition = DATA[self.data]
        return Point(
            preset=preset,
            settings={
                "partition": partition,
                "learning-rate": self.rate,
                "num-rounds": self.cost // (PER_AGGREGATION + self.tau),
                "dp-pasgd.epsilon": self.epsilon,
                "dp-pasgd.num-local-steps": self.tau,
                "dp-pasgd.client-batch-sizes": sizes,
                "dp-pasgd.batch-sampling": self.sampling,
                "dp-pasgd.clip-norm": CLIP_NORM,
                "dp-pasgd.calibration": self.calibration,
                "dp-pasgd.max-resource-cost": float(self.cost),
            },
            arguments=asdict(self),
            numbers=numbers,
        )


def cases() -> dict[str, list[Case]]:
    """Return the points of every part."""
    vehicle, adult = (
        [Case(data=data, epsilon=epsilon, tau=tau, cost=cost) for cost in COSTS for epsilon in EPSILONS for tau in TAUS]
        for data in (VEHICLE, ADULT)
    )
    noise = [
        _private(data, epsilon, TAU_OF_NOISE, sampling, batch)
        for data, sampling, batch in (
            (VEHICLE, "fixed-size", BATCH),
            (VEHICLE, "fixed-size", VEHICLE_BATCH),
            (VEHICLE, "poisson", VEHICLE_BATCH),
            (ADULT, "fixed-size", BATCH),
            (ADULT, "poisson", BATCH),
        )
        for epsilon in EPSILONS
    ]
    poisson = [_private(ADULT, epsilon, tau, "poisson") for epsilon in EPSILONS for tau in TAUS]
    return {"vehicle": vehicle, "adult": adult, "noise": noise, "poisson": poisson}


def _private(data: str, epsilon: float, tau: int, sampling: str, batch: int = BATCH) -> Case:
    return Case(data=data, epsilon=epsilon, tau=tau, sampling=sampling, batch=batch, calibration="exact")


class Results(points.Results):
    """The runs of the file."""

    def of(self, case: Case, key: str) -> list[Any]:
        """Return one number of every run of a point, by seed."""
        return [row[key] for row in self.rows(case)]


def run_all(todo: Sequence[str], costs: Sequence[int], results: Results, seeds: int, data_dir: str) -> None:
    """Make the runs that are not in the results: all points with one seed, before the next seed."""
    sizes: dict[tuple[str, int], str] = {}
    every = cases()
    for seed, case in [(seed, case) for seed in range(seeds) for part in todo for case in every[part]]:
        if case.cost not in costs or results.has(case, seed):
            continue
        key = case.data, case.batch
        if key not in sizes:
            sizes[key] = batch_sizes(case.data, data_dir, case.batch)
        outcome = run_once(case.point(sizes[key]), seed, data_dir)
        results.add(case, {"seed": seed, **asdict(outcome)})
        print(f"{case}, seed {seed}: loss {outcome.loss:.3f}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)


def _spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation; one seed has none."""
    return spread(values) if len(values) > 1 else f"{values[0]:.3f}"


def best(row: Sequence[Case], results: Results) -> Case:
    """Return the point with the least mean validation loss, over the seeds that all points have."""
    seeds = min(len(results.of(case, "validation")) for case in row)
    return min(row, key=lambda case: statistics.fmean(results.of(case, "validation")[:seeds]))


def best_by_seed(row: Sequence[Case], results: Results) -> list[Case]:
    """Return the point with the least validation loss for every seed."""
    columns = zip(*(results.of(case, "validation") for case in row), strict=False)  # a seed may be half done
    return [row[column.index(min(column))] for column in map(list, columns)]


def taus(results: Results, data: str, epsilon: float, cost: int, **rest: Any) -> list[Case]:
    """Return the points of a curve over tau that have runs."""
    row = [Case(data=data, epsilon=epsilon, tau=tau, cost=cost, **rest) for tau in TAUS]
    return [case for case in row if results.of(case, "loss")]


def table_of_taus(results: Results) -> str:
    """Return Figs. 3 and 6: test loss over tau, and the best tau."""
    rows = []
    for data, cost, epsilon in itertools.product((VEHICLE, ADULT), COSTS, EPSILONS):
        row = taus(results, data, epsilon, cost)
        if len(row) == len(TAUS):
            rows.append({"data": data, "cost": cost, "paper's ε": f"{epsilon:g}", **_over_tau(row, results)})
    return table(rows) if rows else "no results"


def _over_tau(row: list[Case], results: Results) -> Row:
    """Return a row of a table, with the seeds that all of its points have."""
    by_seed = [case.tau for case in best_by_seed(row, results)]
    losses = {f"τ = {case.tau}": _spread(results.of(case, "loss")[: len(by_seed)]) for case in row}
    return {**losses, "best τ": best(row, results).tau, "by seed": ", ".join(map(str, by_seed))}


def table_of_trade_offs(results: Results) -> str:
    """Return Figs. 4 and 5: test accuracy at the best tau, over cost and epsilon."""
    rows = []
    for data, cost in itertools.product((VEHICLE, ADULT), sorted(COSTS)):
        curves = {epsilon: taus(results, data, epsilon, cost) for epsilon in EPSILONS}
        if all(len(row) == len(TAUS) for row in curves.values()):
            by_epsilon = {f"ε = {at:g}": _spread(results.of(best(row, results), "accuracy")) for at, row in curves.items()}
            rows.append({"data": data, "cost": cost} | by_epsilon)
    return table(rows) if rows else "no results"


def table_of_noise(results: Results) -> str:
    """Return a table of calibrations and batch samplings, with their noise and proved epsilons."""
    rows = []
    batches = ((VEHICLE, BATCH), (VEHICLE, VEHICLE_BATCH), (ADULT, BATCH))
    noises = (("zcdp", "fixed-size"), ("exact", "fixed-size"), ("exact", "poisson"))
    for (data, batch), epsilon, (calibration, sampling) in itertools.product(batches, EPSILONS, noises):
        given: dict[str, Any] = {"batch": batch, "calibration": calibration, "sampling": sampling}
        case = Case(data=data, epsilon=epsilon, tau=TAU_OF_NOISE, **given)
        if not results.of(case, "loss"):
            continue
        found = results.of(case, "numbers")[-1]
        rows.append(
            {
                "data": data,
                "ε set": f"{epsilon:g}",
                **given,
                "noise std": f"{found['largest noise std']:.3g}",
                "proved ε": f"{found['proved epsilon']:.3f}",
                "loss": _spread(results.of(case, "loss")),
                "accuracy": _spread(results.of(case, "accuracy")),
                "seeds": len(results.of(case, "loss")),
            }
        )
    return table(rows) if rows else "no results"


def table_of_poisson(results: Results) -> str:
    """Return a table of the best tau with Poisson batches, whose noise is several times smaller."""
    rows = []
    for epsilon in EPSILONS:
        row = taus(results, ADULT, epsilon, COSTS[0], sampling="poisson", calibration="exact")
        if len(row) == len(TAUS):
            rows.append({"data": ADULT, "ε": f"{epsilon:g}", **_over_tau(row, results)})
    return table(rows) if rows else "no results"


def draw(results: Results, path: Path) -> None:
    """Draw Fig. 3: test loss over tau, one line per epsilon, with a ring at the tau that validation selects."""
    shown = [(data, cost) for data in (VEHICLE, ADULT) for cost in (500, 1000)]
    titles = [f"{data.replace(ADULT, 'Adult, i.i.d.')}, cost {cost:,}" for data, cost in shown]
    with panels(path, titles, "test loss", rows=2) as every:
        for axes, (data, cost) in zip(every, shown, strict=True):
            for look, epsilon in zip(LOOKS, EPSILONS, strict=True):
                if not (row := taus(results, data, epsilon, cost)):
                    continue
                seeds = min(len(results.of(case, "loss")) for case in row)
                losses = [results.of(case, "loss")[:seeds] for case in row]
                middles, errors = [statistics.fmean(each) for each in losses], [deviation(each) for each in losses]
                at, chosen = [case.tau for case in row], row.index(best(row, results))
                axes.errorbar(at, middles, errors, **look, label=f"ε = {epsilon:g}")
                ring = {"markersize": 13, "fillstyle": "none", "color": look["color"]}
                axes.plot(at[chosen], middles[chosen], "o", **ring)
            axes.set_xscale("log")
            axes.set_xticks(TAUS, [str(tau) for tau in TAUS])
            axes.xaxis.minorticks_off()
            axes.set_xlabel("τ, local steps a round")
        every[0].legend(frameon=False)


def main() -> None:
    """Make the runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS.jsonl")
    parser.add_argument("--data-dir", required=True, help="folder of Adult and Vehicle")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=tuple(cases()), default=list(cases()))
    parser.add_argument("--costs", nargs="+", type=int, choices=COSTS, default=COSTS)
    parser.add_argument("--plot", type=Path, help="draw test loss over tau")
    parser.add_argument("--no-runs", action="store_true", help="make only tables and picture of the runs so far")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    remember_costs()
    results = Results(options.results, Case)
    if not options.no_runs:
        run_all(options.parts, options.costs, results, options.seeds, options.data_dir)
    for title, text in (
        ("Test loss over tau (Figs. 3 and 6); best tau by validation loss", table_of_taus(results)),
        ("Test accuracy at the best tau (Figs. 4 and 5)", table_of_trade_offs(results)),
        (f"Noise and batches, tau = {TAU_OF_NOISE}, cost {COSTS[0]}", table_of_noise(results)),
        (f"Poisson batches, exact noise, cost {COSTS[0]}", table_of_poisson(results)),
    ):
        print(f"\n## {title}\n\n{text}")
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
