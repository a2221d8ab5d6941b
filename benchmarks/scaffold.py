"""Compare the rounds that SCAFFOLD and FedAvg need on heterogeneous clients: MNIST, no privacy, over seeds.

    python benchmarks/scaffold.py [--seeds N] [--data-dir DIR] [--most-rounds N] [--digits N]
                                   [--local-steps N [N ...]]

Logistic regression, HET_MNIST(1): 100 clients with one digit each, 10 random clients per round, E local steps on 12 records each,
constant step size 0.1. FedAvg is the same program without control variates: DP-FedPAQ without noise, quantization or any gradient
that reaches the clip norm. The program counts the rounds until the test accuracy first reaches 85 %, and until it stays there for
five rounds. One process, one torch thread. A seed governs data split, initial model and cohorts. As in any run, a client's
records of a round are drawn anew.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from points import LocalGrid, ParsedRunConfig, app, config_of, deviation, model_arrays, quiet, records, table, test

# The app's defaults, because the other method does not read the preset's table.
DEFAULTS = {"epsilon": 4.0, "clip-norm": 1.0, "sensitivity": "clip-update", "num-local-steps": 10, "decay-iterations": 100.0}
TARGET = 0.85
STAYS = 5


class Reached(Exception):  # noqa: N818 (it is no error)
    """Raised if the accuracy has stayed at the target."""


def rounds_of(method: str, seed: int, steps: int, options: argparse.Namespace) -> tuple[int, int, float]:
    """Return the first round at the target, the first of five in a row, and the seconds; `most_rounds` + 1 for never."""
    table_of = "scaffold" if method == "scaffold" else "dp-fedpaq"
    settings: dict[str, Any] = {
        "method": table_of,
        "partition": "het-mnist",
        "classes-per-client": options.digits,
        "num-clients": 100,
        "sampling": "fixed-size",
        "cohort-size": 10,
        "num-rounds": options.most_rounds,
        "batch-size": 12 if options.data_dir else 2,
        "learning-rate": 0.1,
        "seed": seed,
        "data-dir": options.data_dir,
        **{f"scaffold.{key}": value for key, value in DEFAULTS.items()},
        f"{table_of}.epsilon": float("inf"),
        f"{table_of}.clip-norm": 1e4,
        f"{table_of}.sensitivity": "per-step",
        f"{table_of}.num-local-steps": steps,
        f"{table_of}.decay-iterations": 0.0,
        f"{table_of}.quantization-levels": 0,
        f"{table_of}.num-replies": options.most_rounds,
    }
    config = config_of("mnist-scaffold-not-private", settings)
    run = ParsedRunConfig.of(config)
    dealt, model = records.deal(records.config_of(config)), run.model()
    public = records.records_to_test_with(run, records.config_of(config))
    strategy = run.strategy(lambda: {name: len(own) for name, own in dealt.clients.items()})
    strategy.noise_seed = seed  # draws cohorts; there is no noise
    reached: list[int] = []

    def look(server_round: int, arrays: Any) -> None:
        if server_round == 0:
            return
        _, accuracy = test(run, model, arrays, public)
        if accuracy >= TARGET:
            reached.append(server_round)
        if reached[-STAYS:] == list(range(server_round - STAYS + 1, server_round + 1)):
            raise Reached

    started, never = time.monotonic(), options.most_rounds + 1
    try:
        strategy.start(LocalGrid(app, 1, **config), model_arrays(model), num_rounds=options.most_rounds, evaluate_fn=look)
        stays = never
    except Reached:
        stays = reached[-STAYS]
    return (reached[0] if reached else never), stays, time.monotonic() - started


def answer(values: list[int], most: int) -> str:
    """Return mean, spread and every value."""
    each = ", ".join("never" if value > most else str(value) for value in values)
    return each if max(values) > most else f"{statistics.fmean(values):.1f} ± {deviation(values):.1f} ({each})"


def main() -> None:
    """Run both methods for every number of local steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--data-dir", default="", help="folder of the full MNIST; the embedded digits by default, 2 records a step"
    )
    parser.add_argument("--most-rounds", type=int, default=150)
    parser.add_argument("--digits", type=int, default=1, help="number of digits per client")
    parser.add_argument("--local-steps", type=int, nargs="+", default=[10])
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    rows = []
    for steps in options.local_steps:
        for method in ("fedavg", "scaffold"):
            measured = [rounds_of(method, seed, steps, options) for seed in range(options.seeds)]
            print(f"{method}, E = {steps}: {measured}", file=sys.stderr, flush=True)
            rows.append(
                {
                    "E": steps,
                    "method": "SCAFFOLD" if method == "scaffold" else "FedAvg",
                    "first round at 85 %": answer([one for one, _, _ in measured], options.most_rounds),
                    "stays there from round": answer([one for _, one, _ in measured], options.most_rounds),
                }
            )
    print(table(rows))


if __name__ == "__main__":
    main()
