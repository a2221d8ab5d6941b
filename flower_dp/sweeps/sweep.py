"""A sweep: its runs are made, what is left of them after an interruption, and its results and statement are written."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flower_dp.core import checks
from flower_dp.running import flower_log, preflight
from flower_dp.running.launch_record import LaunchRecord
from flower_dp.running.preflight import default_workers
from flower_dp.running.progress import clock, quantities, round_text
from flower_dp.running.run_folder import LOG, RunFolder, forget_statement, is_finished, read_metrics
from flower_dp.running.signals import Signals
from flower_dp.simulation.workers import unused_gpus
from flower_dp.sweeps import plan
from flower_dp.sweeps.cost import CHOOSING, statement_of
from flower_dp.sweeps.file import SweepFile, read
from flower_dp.sweeps.folder import SweepFolder
from flower_dp.sweeps.plan import SweepRun
from flower_dp.sweeps.pool import Pool, RunOutcome
from flower_dp.sweeps.results import Results

Tell = Callable[[str], None]
# Seconds without a line after which the sweep says how far it is.
_TOLD_SECONDS = 30.0
# Metrics of the records that results are reported on.
_OF_TEST = ("accuracy", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep as its file says.

    Attributes:
        path: of the file.
        file: its content.
        runs: all of them, in the order in which they are made.
    """

    path: Path
    file: SweepFile
    runs: tuple[SweepRun, ...]

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Read a sweep's file, and resolve the settings of all runs.

        Raises:
            ValueError: with all that is wrong, a line each.
        """
        file = read(path)
        if file.private_selection is not None:
            raise ValueError("private-selection: such a file shows one run alone, with --private-selection")
        return cls(path=path, file=file, runs=plan.planned(file, default_workers()))

    def check(self, folder: SweepFolder | None) -> None:
        """Start nothing, and refuse all that `make` would refuse, and each of its runs when it begins.

        Without a folder, nothing is refused that an earlier sweep in it would be the reason of.

        Raises:
            SettingsError: with all that is wrong, a line each.
        """
        findings = checks.ErrorCollector()
        with findings.collect_errors():
            plan.check(self.runs, forecast=True)
        if folder is not None:
            with findings.collect_errors():
                folder.check(self.runs)
        findings.raise_if_any()

    def make(self, folder: SweepFolder, tell: Tell, *, jobs: int | None = None) -> list[RunOutcome]:
        """Make the runs that have not finished, and write the sweep's results and statement, also after an interruption.

        Args:
            folder: of the sweep.
            tell: shows a line.
            jobs: runs at once, at most; None: as the file says.

        Returns:
            The runs that have failed.

        Raises:
            ValueError: if settings are refused, or the folder is that of other runs; nothing was started then.
            Interrupted: a signal came; no process is left.
        """
        results = self._results(folder)
        with folder.locked() as lock:
            folder.check(self.runs)
            left = [run for run in self.runs if not is_finished(folder.of(run))]
            if done := len(self.runs) - len(left):
                tell(f"{done} of {len(self.runs)} runs have finished before")
            progress = _Progress(tell, results, len(left))
            if left:
                self._make(left, folder, lock, jobs or self.file.jobs, progress)
            else:
                self._write(results)
        return progress.failed

    def _results(self, folder: SweepFolder) -> Results:
        return Results(folder=folder, runs=self.runs, metric=self.file.metric)

    def unknown(self, folder: SweepFolder) -> list[str]:
        """Return a line for each metric of the file that no finished run has, while there are finished runs."""
        chosen_by = () if self.file.select is None else (self.file.select.metric,)
        return self._results(folder).unknown((self.file.metric, *chosen_by))

    def warned(self, folder: SweepFolder) -> list[str]:
        """Return a line for each run with warnings in its log. For the screen: what others see has none of it, as of the log."""
        found = ((run.told, log, flower_log.warnings_of(log)) for run in self.runs for log in [folder.of(run) / LOG])
        return [f"{told}: {flower_log.num_warnings(warnings)}, in {log}" for told, log, warnings in found if warnings]

    def _make(self, left: Sequence[SweepRun], folder: SweepFolder, lock: Path, jobs: int | None, progress: "_Progress") -> None:
        begun = False
        try:
            with Signals() as signals, Pool(left, jobs, lock, signals) as pool:
                plan.check(left)  # while they start
                signals.check()
                folder.keep(self.path)
                forget_statement(folder.path)  # which the runs are about to outgrow, and a kill would leave it
                made, begun = folder.left(left), True
                progress.begin(pool.count, left[0].launched, sum(goes_on for _, _, goes_on in made))
                pool.make(made, progress.ended, progress.running)
        finally:
            if begun:
                self._write(progress.results)

    def _write(self, results: Results) -> None:
        if begun := results.folder.runs():  # first: what is charged is known, even if no table can be made
            statement = statement_of(begun)
            RunFolder(results.folder.path).state(statement.to_dict(), str(statement))
        results.write_rows()
        curves = results.curves()
        results.write_table(curves, self.best(results))
        results.draw(curves)

    def best(self, results: Results) -> str:
        """Return which point is the best by the file's choice, with what that costs; empty without a choice or a point.

        If no finished run has the metric of the choice, that is said instead.
        """
        choice = self.file.select
        if choice is None:
            return ""
        if (best := results.best(choice)) is None:
            return "\n".join(f"select.{line}" for line in results.unknown((choice.metric,)))
        of = "of its one seed" if best.num_seeds == 1 else f"on the mean of {best.num_seeds} seeds"
        lines = [
            f"Best by {choice.metric} ({choice.mode}), {best.mean:.4g} {of}: {best.run.label or 'the only point'}.",
            f"{best.run.command}",
            f"Not covered: {CHOOSING}.",
        ]
        if choice.metric in _OF_TEST:
            lines.append(f"{choice.metric} is of the test records: chosen by it, the best point's own result is too good.")
        return "\n".join(lines)


class _Progress:
    """A line for each run that has ended, with what is left."""

    def __init__(self, tell: Tell, results: Results, num_left: int) -> None:
        self._tell, self.results, self._left = tell, results, num_left
        self._began, self._ended = time.monotonic(), 0
        self._told = self._began
        self.failed: list[RunOutcome] = []

    def begin(self, count: int, one: LaunchRecord, going_on: int) -> None:
        """Say how the runs are made, and whether they leave this machine's GPUs alone, if it has any."""
        more = f"; {going_on} of them from a checkpoint" if going_on else ""
        each = "1 worker" if one.workers == 1 else f"{one.workers} workers"
        self._tell(f"{self._left} runs to make, {count} at once, {each} each{more}")
        gpus = 0 if one.gpus_per_worker else preflight.num_gpus() or 0
        if line := unused_gpus(gpus, "gpus-per-worker = 1 to its file", user="sweep"):
            self._tell(line)

    def running(self, runs: Sequence[SweepRun]) -> None:
        """Say from time to time in which rounds the runs are that have any, and what is left."""
        now, done, parts = time.monotonic(), float(self._ended), []
        if now < self._told + _TOLD_SECONDS:
            return
        for run in runs:
            rows = read_metrics(self.results.folder.of(run))
            last = rows[-1] if rows else {}
            if isinstance(total := last.get("num-rounds"), int) and total > 0 and last.get("round"):
                done += min(last["round"] / total, 1.0)
                parts.append(f"{run.told}: {round_text(last)}")
        if parts:
            self._told = now
            seconds = (now - self._began) / done * (self._ended + self._left - done)
            self._tell(f"{'; '.join(parts)}; {self._left} left, about {clock(seconds)}")

    def ended(self, ended: RunOutcome) -> None:
        """Say how a run ended, and write the results so far."""
        folder = self.results.folder.of(ended.run)
        self._left, self._ended, self._told = self._left - 1, self._ended + 1, time.monotonic()
        if ended.status == "completed" and not is_finished(folder):
            ended = RunOutcome(run=ended.run, status="failed", details="the app has recorded no run", seconds=ended.seconds)
        if ended.status == "completed":
            numbers = {key: value for row in read_metrics(folder) for key, value in row.items()}
            warnings = flower_log.warnings_of(folder / LOG)
            warned = [flower_log.num_warnings(warnings)] if warnings else []
            told = ", ".join([*quantities(numbers), *warned, clock(ended.seconds)])
        else:
            self.failed.append(ended)
            why = ended.details.strip().splitlines() or ["no reason given"]
            told = f"{ended.status.upper()}: {why[-1]}; its log is {folder / LOG}"
        seconds = (time.monotonic() - self._began) / self._ended * self._left
        rest = f"{self._left} left, about {clock(seconds)}" if self._left else "none left"
        num_runs = len(self.results.runs)
        self._tell(f"[{num_runs - self._left}/{num_runs}] {ended.run.told}: {told}; {rest}")
        self.results.write_rows()
