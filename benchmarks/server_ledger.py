"""Measure the time of a server's ledger: a round of a client-level run, and a round of 1,000 clients of a million.

    python benchmarks/server_ledger.py [--clients 1000000] [--cohort 1000] [--rounds 200] [--folder FOLDER]

Every cohort is drawn from clients that were charged before, and the ledger is on the disk of FOLDER. Beside each time the program
prints the time of one write of 4 KiB with fsync there, which every ledger needs.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, CostScope
from flower_dp.privacy.store import Store

EVENT = PoissonSampledDpEvent(0.01, GaussianDpEvent(2.0))


def charge(number: int, owners: tuple[str, ...]) -> Charge:
    """Return the next charge of these clients."""
    return Charge(
        release="dp-pasgd",
        number=number,
        server_round=number,
        fingerprint="a benchmark",
        scope=CostScope(unit="client", relation="add-or-remove-one"),
        owners=owners,
        events=(EVENT,),
    )


Times = list[tuple[float, float]]


def told(what: str, times: Times) -> None:
    """Print median, 95th percentile and maximum in milliseconds, and the median of the processor's time."""
    of, processor = (sorted(1e3 * one for one in column) for column in zip(*times, strict=True))
    print(
        f"{what}: median {statistics.median(of):.2f} ms, 95 % below {of[int(0.95 * len(of))]:.2f} ms, at most {of[-1]:.2f} ms; "
        f"median of the processor's time {statistics.median(processor):.2f} ms"
    )


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds and the processor seconds of a call."""
    started, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - started, time.process_time() - busy


def charged(ledger: Store, run: str, cohorts: list[tuple[str, ...]], first: int) -> Times:
    """Charge cohorts, one after another, and return the time of each."""
    made = [charge(number, names) for number, names in enumerate(cohorts, start=first)]
    return [timed(partial(ledger.append, run, one)) for one in made]


@contextmanager
def begun(path: Path, budget: LedgerBudget | None) -> Iterator[tuple[Store, str]]:
    """Create a ledger, and start a run on it."""
    Store.create(path, budget)
    with Store(path) as ledger:
        yield ledger, ledger.begin(method="benchmark", delta=1e-6)


def fsyncs(folder: Path, count: int) -> Times:
    """Return the times of writes of 4 KiB with fsync over existing content."""
    descriptor = os.open(folder / "fsync", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(descriptor, bytes(4096), 0)
    os.fsync(descriptor)

    def write() -> None:
        os.pwrite(descriptor, os.urandom(4096), 0)
        os.fsync(descriptor)

    times = [timed(write) for _ in range(count)]
    os.close(descriptor)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--folder", help="folder of the ledger; default: the folder of temporary files")
    words = parser.parse_args()
    rng = np.random.default_rng()
    with tempfile.TemporaryDirectory(dir=words.folder) as name:
        folder = Path(name)
        told("one write of 4 KiB with fsync", fsyncs(folder, words.rounds))
        budgets = {"": None, ", with a budget": LedgerBudget(epsilon=50.0, delta=1e-6)}
        for what, budget in budgets.items():
            with begun(folder / f"every{bool(budget)}.sqlite", budget) as (ledger, run):
                told(f"a round of a client-level run{what}", charged(ledger, run, [(ALL_CLIENTS,)] * words.rounds, 1))
        for what, budget in budgets.items():
            path = folder / f"books{bool(budget)}.sqlite"
            names = [f"client-{number:07d}" for number in rng.permutation(words.clients)]
            with begun(path, budget) as (ledger, run):
                parts = [tuple(names[start : start + 50_000]) for start in range(0, len(names), 50_000)]
                charged(ledger, run, parts, 1)
                cohorts = [
                    tuple(names[place] for place in rng.choice(len(names), words.cohort, replace=False))
                    for _ in range(words.rounds)
                ]
                times = charged(ledger, run, cohorts, len(parts) + 1)
                told(f"a round of {words.cohort:,} of {words.clients:,} clients{what}", times)
            seconds, busy = timed(lambda path=path: Store(path).close())  # type: ignore[misc]
            size = path.stat().st_size / 1e6
            print(f"  opened again, every charge checked: {seconds:.1f} s, processor {busy:.1f} s, {size:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
