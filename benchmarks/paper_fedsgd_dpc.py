"""Compare the planned (b, T) of FedSGD-DPC with Laplace noise with b in {1, 5, 10} and T five times too small or too large.

All settings were fixed before the first full run. From the paper: N = 10, equal sizes, two digits a client, logistic regression
without bias, L1 clip norm 300, learning rate 0.05, decaying (the preset: by 1 % per round), epsilon 5 and 10. Not from the paper:
1,000 records per client, not 6,000, because b = 10 with 1,220 rounds over 6,000 would take hours. With 800 the plan for epsilon 5
is b = 10, T = 1, which is not the paper's case. The embedded digits give 400 records, and that case.

There are two plans: from constants estimated on the clients' data (as the paper says), and from the constants that fit the
paper's Table I for MNIST, with the noise for the available records (C2 is proportional to 1 / n^2).
"""

import math
from pathlib import Path
from typing import Any

from points import LOOKS, Measured, Point, Row, config_of, difference, panels, spread, table
from scipy.optimize import least_squares

from flower_dp.apps.pilot import pilot
from flower_dp.planning.fedsgd_dpc import Candidate, Problem, num_replies, plan
from flower_dp.planning.planner import Plan
from flower_dp.privacy.statement import PrivacyStatement

Answer = Plan[Problem, Candidate]
PRESET = "mnist-fedsgd-dpc-laplace-full"
EPSILONS = (5.0, 10.0)
COHORTS = (1, 5, 10)
NUM_CLIENTS, PAPERS_RECORDS = 10, 6000

# Table I, MNIST: T* by b, at epsilon 1, 5, 10.
_TABLE = {1: (22, 121, 244), 5: (5, 32, 67), 10: (2, 20, 42)}
_TABLE_EPSILONS = (1.0, 5.0, 10.0)


def constants_of_table() -> tuple[float, float, float]:
    """Return gamma, C1/C2 and C3/C2 (at epsilon 1), fitted by least squares to the nine T* of the paper's Table I."""

    def errors(constants: tuple[float, float, float]) -> list[float]:
        found = []
        for cohort, row in _TABLE.items():
            for epsilon, rounds in zip(_TABLE_EPSILONS, row, strict=True):
                answer = plan(table_problem(constants, epsilon, PAPERS_RECORDS) | {"cohort_size": cohort})
                found.append((answer.candidates[0].continuous_num_rounds or 0.0) - rounds)
        return found

    # smoothness >= strong_convexity puts gamma at 2 or more.
    fit = least_squares(errors, [4.0, 300.0, 100.0], bounds=([2.0, 1.0, 0.0], [100.0, 1e5, 1e5]), x_scale=[4.0, 300.0, 100.0])
    gamma, first, third = (float(value) for value in fit.x)
    return gamma, first, third


def table_problem(constants: tuple[float, float, float], epsilon: float, num_records: int) -> dict[str, Any]:
    """Return a problem with these constants, in which C2 = (6,000 / n_i)^2 / epsilon^2; mu = 2, Gamma = 0."""
    gamma, first, third = constants
    return {
        "mechanism": "laplace",
        "num_clients": NUM_CLIENTS,
        "num_records": num_records,
        "dimension": 1,
        "clip_norm": PAPERS_RECORDS * 10 / math.sqrt(8),  # C2 = 8 clip^2 / (100 n_i^2 epsilon^2)
        "epsilon": epsilon,
        "strong_convexity": 2.0,
        "smoothness": gamma,
        "gradient_bound": math.sqrt(9 * first / 20),
        "heterogeneity": 0.0,
        "initial_distance": (third + first / 10) / gamma,
    }


def plans_of_data(num_records: int, data_dir: str) -> dict[float, Answer]:
    """Return the plan from the constants of the clients' data (seed 0), with the noise of a dimension-7,840 model."""
    config = config_of(PRESET, {"records-per-client": num_records, "data-dir": data_dir})
    values = pilot("fedsgd-dpc", config).values
    return {epsilon: plan({**values, "epsilon": epsilon}) for epsilon in EPSILONS}


def points(
    num_records: int, most_replies: int, plans: dict[float, Answer], estimated: dict[float, Answer]
) -> tuple[list[Point], list[str]]:
    """Return the points, each epsilon's plan first, and the points left out for their number of replies."""
    chosen, left_out = [], []
    for epsilon in EPSILONS:
        best = plans[epsilon].best
        own = (best.cohort_size, best.num_rounds)
        off = [(b, t) for t in (max(1, round(best.num_rounds / 5)), 5 * best.num_rounds) for b in COHORTS]
        # If the plan has one round or none, a T that is five times too small is the plan itself or no training.
        pairs = [own, *(pair for pair in off if pair != own and pair[1])]
        pairs.append((estimated[epsilon].best.cohort_size, estimated[epsilon].best.num_rounds))
        plan_of = {0: "Table I", len(pairs) - 1: "data"}
        for index, (cohort, rounds) in enumerate(pairs):
            arguments = {"epsilon": f"{epsilon:g}", "b": cohort, "T": rounds, "plan": plan_of.get(index, "")}
            settings = {
                "records-per-client": num_records,
                "fedsgd-dpc.epsilon": epsilon,
                "cohort-size": cohort,
                "num-rounds": rounds,
            }
            if cohort * rounds > most_replies:
                left_out.append(f"epsilon={epsilon:g} b={cohort} T={rounds}")
            else:
                chosen.append(Point(preset=PRESET, settings=settings, arguments=arguments, numbers=_numbers))
    return chosen, left_out


def _numbers(strategy: Any, statement: PrivacyStatement) -> Row:
    if not strategy.charges.number(strategy.rules.training.name):
        return {"replies": 0, "noise scale": 0.0, "tight": 0.0, "paper": 0.0}
    replies = num_replies(strategy.num_clients, strategy.rules.cohort_size, strategy.charges.number(strategy.rules.training.name))
    scale = statement.noise["max_noise_scale_of_a_mean_gradient"]
    return {"replies": replies, "noise scale": scale, "tight": statement.epsilon, "paper": statement.paper_epsilon.epsilon}


def report(results: list[Measured]) -> str:
    """Return the table, with every loss compared with that of the plan of the same epsilon, seed by seed."""
    rows = []
    for result in results:
        planned = next(r for r in results if r.arguments["epsilon"] == result.arguments["epsilon"])
        own = result is planned
        rows.append(
            {
                "planned from": result.arguments["plan"],
                "ε": result.arguments["epsilon"],
                "b": result.arguments["b"],
                "T": result.arguments["T"],
                "replies a client": result.numbers["replies"],
                "noise scale": result.numbers["noise scale"],
                "loss": spread(result.losses),
                "accuracy": spread(result.accuracies),
                "loss - planned": "" if own else difference(result, planned),
                "proved ε": f"{result.numbers['tight']:.4f}",
                "paper's ε": f"{result.numbers['paper']:.4f}",
            }
        )
    return table(rows)


def verdicts(results: list[Measured]) -> list[str]:
    """Return for each epsilon whether the plan has the least mean loss."""
    lines = []
    for epsilon in dict.fromkeys(result.arguments["epsilon"] for result in results):
        own = [result for result in results if result.arguments["epsilon"] == epsilon]
        planned, others = own[0], [result for result in own[1:] if result.arguments["plan"] != "data"]
        best = min(own, key=lambda result: result.loss)
        beaten = sum(planned.loss < other.loss for other in others)
        lines.append(
            f"epsilon={epsilon}: planned b={planned.arguments['b']}, T={planned.arguments['T']} beats {beaten} of {len(others)} "
            f"others; least loss of all: b={best.arguments['b']}, T={best.arguments['T']}"
        )
    return lines


def draw(results: list[Measured], path: Path) -> None:
    """Draw the test loss over T, one line per b, with a ring at the plan from the constants of Table I."""
    with panels(path, [f"ε = {epsilon:g}" for epsilon in EPSILONS], "test loss") as every:
        for axes, epsilon in zip(every, EPSILONS, strict=True):
            own = [result for result in results if result.arguments["epsilon"] == f"{epsilon:g}"]
            planned = own[0]
            for look, cohort in zip(LOOKS, COHORTS, strict=False):
                line = [result for result in own if result.arguments["b"] == cohort and result.arguments["T"]]
                line.sort(key=lambda result: int(result.arguments["T"]))
                at = [result.arguments["T"] for result in line]
                axes.errorbar(at, [r.loss for r in line], [r.loss_spread for r in line], **look, label=f"b = {cohort}")
            ring = {"markersize": 13, "fillstyle": "none", "color": "black"}
            axes.plot(planned.arguments["T"], planned.loss, "o", **ring, linestyle="none", label="planned")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("T, rounds")
        every[0].legend(frameon=False)
