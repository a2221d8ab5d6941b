"""Kill servers and devices at many points: `python -m tests.crash --help`."""

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from tests.crash import device, server
from tests.crash.lives import live, seconds_of
from tests.crash.server import Holes, Setup
from tests.crash.witness import Heard

# Of a run's first lives; the last one is not killed.
MOST_KILLS = 3
# So many of the points raise KeyboardInterrupt, in place of SIGKILL.
INTERRUPTED = 0.25
# So many processes write a checkpoint after every round; the others where it takes little of their time.
OFTEN = 0.5
WHOM: dict[str, tuple[ModuleType, Setup]] = {
    **{name: (server, setup) for name, setup in server.SETUPS.items()},
    **{f"device, {name}": (device, setup) for name, setup in device.DEVICES.items()},
}


@dataclass(slots=True)
class Tally:
    """What came of the points of one method."""

    points: int = 0
    runs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    holes: list[str] = field(default_factory=list)


class Kills:
    """Runs of one method, killed.

    Args:
        name: of the method.
        who: what is killed: the module `server` or `device`.
        setup: the method.
        folder: where the runs are.
        draw: points and times.
    """

    def __init__(self, name: str, who: ModuleType, setup: Setup, folder: Path, draw: random.Random) -> None:
        self.name, self._who, self._setup, self._folder, self._draw = name, who, setup, folder, draw
        self.tally = Tally()

    def measure(self) -> tuple[int, float]:
        """Return how many points a run has that is not killed, and how long it takes."""
        server.warm(self._setup, Path(tempfile.mkdtemp(dir=self._folder)) / "run")
        folder = self._new()
        seconds = seconds_of(lambda: self._live(folder, 1, None, None))
        self._end(folder, ["no kill"])
        (line,) = Heard.of(folder / "witness").all("points")
        shutil.rmtree(folder)
        return sum(line["passed"].values()), seconds

    def run(self, at: int | None, num_points: int, seconds: float) -> None:
        """Kill a run at a point, or at a random time, go on, kill it perhaps again, and let it end.

        A run has fewer points than the one that was measured where cohorts are smaller, or fewer checkpoints are written: if it ends
        before its point, another run is killed at an earlier one.
        """
        before = self.tally.points
        self._run(at, num_points, seconds)
        while at is not None and at > 1 and self.tally.points == before and not self.tally.holes:
            at = at * 3 // 4
            self._run(at, num_points, seconds)

    def _run(self, at: int | None, num_points: int, seconds: float) -> None:
        folder, killed = self._new(), []
        for life in range(1, MOST_KILLS + 1):
            late = None if at else self._draw.uniform(0, seconds)
            interrupts = at is not None and self._draw.random() < INTERRUPTED
            told = f"{late:.3f} s" if at is None else f"point {at}{' (interrupted)' if interrupts else ''}"
            status = self._live(folder, life, at, late, interrupts=interrupts)
            if status == 0:
                break
            if status != (1 if interrupts else -9):
                self._hole(folder, killed, f"life {life} failed: {tail(folder)}")
                return
            killed.append(told)
            self._count(folder, at, interrupts)
            holes = Holes()
            self._who.check_now(self._setup, folder, holes)
            for hole in holes.found:
                self._hole(folder, killed, hole)
            if holes.found:
                return
            if self._draw.random() < 0.5:
                break
            at = self._draw.randrange(1, num_points) if self._draw.random() < 0.5 else None
        if status != 0 and self._live(folder, MOST_KILLS + 1, None, None) != 0:
            self._hole(folder, killed, f"it does not go on: {tail(folder)}")
            return
        self._end(folder, killed)

    def _end(self, folder: Path, killed: Sequence[str]) -> None:
        self.tally.runs += 1
        holes = Holes()
        self._who.check_now(self._setup, folder, holes)
        self._who.check_end(self._setup, folder, holes)
        for hole in holes.found:
            self._hole(folder, killed, hole)
        if not holes.found and killed != ["no kill"]:
            shutil.rmtree(folder)

    def _live(self, folder: Path, life: int, at: int | None, seconds: float | None, *, interrupts: bool = False) -> int:
        often = self._draw.random() < OFTEN
        run = self._who.run
        return live(lambda: run(self._setup, folder, life, at, interrupts=interrupts, often=often), folder / "output", seconds)

    def _new(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self._folder)) / "run"
        server.create(self._setup, folder)
        return folder

    def _count(self, folder: Path, at: int | None, interrupts: bool) -> None:
        self.tally.points += 1
        words = [line["kind"] for line in Heard.of(folder / "witness").all("killed")]
        self.tally.kinds["interrupted" if interrupts else words[-1] if at else "at a random time"] += 1

    def _hole(self, folder: Path, killed: Sequence[str], what: str) -> None:
        self.tally.holes.append(f"{self.name}: killed at {', '.join(killed)}: {what} [{folder}]")


def tail(folder: Path) -> str:
    return (folder / "output").read_text()[-1500:]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and the holes as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, help="of each method, drawn from all; default: all")
    parser.add_argument("--times", type=int, default=20, help="runs of each method that are killed at random times")
    parser.add_argument("--methods", nargs="*", default=list(WHOM), help=", ".join(WHOM))
    parser.add_argument("--folder", type=Path, help="an existing one; what failed stays there")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(dir=chosen.folder, prefix="crash-"))
    tallies = {}
    for name in chosen.methods:
        draw = random.Random(f"{chosen.seed} {name}")
        kills = Kills(name, *WHOM[name], folder, draw)
        total, seconds = kills.measure()
        every = range(1, total + 1)
        for at in every if chosen.points is None else sorted(draw.sample(every, min(chosen.points, total))):
            kills.run(at, total, seconds)
        for _ in range(chosen.times):
            kills.run(None, total, seconds)
        tallies[name] = kills.tally
        done = f"{kills.tally.points:4} killed {kills.tally.runs:4} runs {len(kills.tally.holes):3} holes"
        _say(f"{name:30} {total:4} points a run, {seconds:.1f} s; {done}")
    kinds = sum((tally.kinds for tally in tallies.values()), Counter[str]())
    for kind, count in sorted(kinds.items()):
        _say(f"  {kind:30} {count:5}")
    holes = [hole for tally in tallies.values() for hole in tally.holes]
    for hole in holes:
        _say(hole)
    _say(json.dumps({"points": sum(one.points for one in tallies.values()), "holes": len(holes), "seed": chosen.seed}))
    if not holes:
        shutil.rmtree(folder)
    return os.EX_OK if not holes else 1


if __name__ == "__main__":
    raise SystemExit(main())
