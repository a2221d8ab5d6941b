"""Compare the seconds of a round of DP-FTRL with one of DP-FedAvg, in pairs, at a million parameters.

    python benchmarks/dp_ftrl_round.py [--rounds N] [--cohort M] [--records R] [--noise blt|bisr|banded|tree] [--checkpoints]

Both strategies run in this process, in turn, with real clients that train an MLP of 1,018,390 parameters on random records. Both
have the same cohorts in number. Each pair has one round of each, and the order changes from pair to pair. The program prints
medians and quartiles of both, and of the ratios of the pairs. With `--checkpoints` every round writes its charge and its secret
state to a folder, and checkpoints take at most 5 % of the time, as in `flower-dp run`.
"""

import argparse
import logging
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from flwr.app import Context
from torch import nn

from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FixedSizeSampling
from flower_dp.planning.correlated_noise import noise_named
from flower_dp.simulation.local_grid import LocalGrid
from flower_dp.strategies import DPFTRL, DPFedAvg, DPStrategy

NUM_CLIENTS, FEATURES, HIDDEN, CLASSES = 100, 784, 1280, 10


def model() -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def app(records: int) -> Any:
    """Return the clients' app; a node hosts one client."""
    data = {
        number: TensorRecords(inputs=torch.randn(records, FEATURES), targets=torch.randint(0, CLASSES, (records,)))
        for number in range(NUM_CLIENTS)
    }
    shared = model()

    def client_fn(context: Context) -> DPClient:
        number = int(context.node_config["partition-id"])
        return DPClient(
            model=shared, clients={f"c{number}": data[number]}, training=Training(learning_rate=0.1, batch_size=4), device="cpu"
        )

    return client_app(client_fn)


class Paced(threading.Thread):
    """A run whose rounds begin when they are told to."""

    def __init__(self, strategy: DPStrategy, records: int, rounds: int, folder: Path | None) -> None:
        super().__init__(daemon=True)
        self.strategy, self.rounds, self.folder = strategy, rounds, folder
        self.grid = LocalGrid(app(records), NUM_CLIENTS)
        self.go: Queue[None] = Queue()
        self.done: Queue[float] = Queue()
        self.began = 0.0

    def run(self) -> None:
        """Run all rounds; a round is over when the next one could begin."""
        self.strategy.start(
            self.grid,
            model_arrays(model()),
            self.rounds,
            checkpoint_dir=self.folder,
            evaluate_fn=lambda number, arrays: self.pace(),
        )

    def pace(self) -> None:
        """Report the seconds of the round that is over, and wait."""
        self.done.put(time.perf_counter() - self.began)
        self.go.get()
        self.began = time.perf_counter()

    def seconds(self) -> float:
        """Let one round run; return its seconds."""
        self.go.put(None)
        return self.done.get()


def main() -> None:
    """Run the pairs and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--records", type=int, default=60)
    parser.add_argument("--noise", default="blt")
    parser.add_argument("--bands", type=int, default=0)
    parser.add_argument("--checkpoints", action="store_true")
    chosen = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    words: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 2.0, "num_clients": NUM_CLIENTS, "delta": 1e-5}
    separation = MinimumSeparationSampling(cohort_size=chosen.cohort, min_separation=NUM_CLIENTS // chosen.cohort)
    noise = noise_named(chosen.noise, bands=chosen.bands)
    strategies: dict[str, DPStrategy] = {
        "DP-FedAvg": DPFedAvg(**words, sampling=FixedSizeSampling(cohort_size=chosen.cohort)),
        "DP-FTRL": DPFTRL(**words, sampling=separation, num_rounds=chosen.rounds, noise=noise),
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, strategy in strategies.items():
            place = Path(folder) / name if chosen.checkpoints else None
            runs[name] = Paced(strategy, chosen.records, chosen.rounds, place)
            runs[name].start()
            runs[name].done.get()
        found: dict[str, list[float]] = {name: [] for name in runs}
        for pair in range(chosen.rounds):
            for name in sorted(runs, reverse=bool(pair % 2)):
                found[name].append(runs[name].seconds())
    print(f"{platform.platform()}, {torch.get_num_threads()} threads; {noise}; cohort {chosen.cohort}, {chosen.records} records")
    warm = {name: seconds[2:] for name, seconds in found.items()}
    warm["ratio"] = [one / other for one, other in zip(warm["DP-FTRL"], warm["DP-FedAvg"], strict=True)]
    for name, values in warm.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:<10} median {middle:.3f}, quartiles {low:.3f} to {high:.3f}, {len(values)} rounds")


if __name__ == "__main__":
    main()
