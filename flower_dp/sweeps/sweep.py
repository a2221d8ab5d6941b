"""A sweep: makes its runs, or the runs left after an interruption, and writes its results and statement."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
# Seconds without a line after which the sweep reports its progress.
_PROGRESS_SECONDS = 30.0
# Metrics on the test records, on which results are reported.
_OF_TEST = ("accuracy", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep as its file describes it.

    Attributes:
        path: path of the file.
        file: content of the file.
        runs: all runs, in the order in which they are made.
    """

    path: Path
    file: SweepFile
    runs: tuple[SweepRun, ...]

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Read a sweep's file, and resolve the settings of all runs.

        Raises:
            ValueError: with one line for each error.
        """
        file = read(path)
        if file.private_selection is not None:
            raise ValueError("private-selection: shows one run alone; add --private-selection to the command")
        return cls(path=path, file=file, runs=plan.planned(file, default_workers()))

    def check(self, folder: SweepFolder | None) -> None:
        """Refuse everything that `make`, or one of its runs at its start, would refuse; start nothing.

        Without a folder, runs are not compared with those of an earlier sweep.

        Raises:
            SettingsError: with one line for each error.
        """
        errors = checks.ErrorCollector()
        with errors.collect_errors():
            plan.check(self.runs, forecast=True)
        if folder is not None:
            with errors.collect_errors():
                folder.check(self.runs)
        errors.raise_if_any()

    def make(self, folder: SweepFolder, tell: Tell, *, jobs: int | None = None) -> list[RunOutcome]:
        """Make the unfinished runs. Write the sweep's results and statement, even after an interruption.

        Args:
            folder: folder of the sweep.
            tell: function that shows a line.
            jobs: maximum number of simultaneous runs; None: that of the file.

        Returns:
            The outcomes of the runs that failed.

        Raises:
            ValueError: if settings are refused, or the folder holds other runs; then nothing was started.
            Interrupted: if a signal came; no process is left.
        """
        results = self._results(folder)
        with folder.locked() as lock:
            folder.check(self.runs)
            left = [run for run in self.runs if not is_finished(folder.of(run))]
            if done := len(self.runs) - len(left):
                tell(f"{done} of {len(self.runs)} runs have already finished")
            progress = _Progress(tell, results, len(left))
            if left:
                self._make(left, folder, lock, jobs or self.file.jobs, progress)
            else:
                self._write(results)
        return progress.failed

    def _results(self, folder: SweepFolder) -> Results:
        return Results(folder=folder, runs=self.runs, metric=self.file.metric)

    def unknown(self, folder: SweepFolder) -> list[str]:
        """Return a line for each metric of the file that no finished run has; no line if no run has finished."""
        chosen_by = () if self.file.select is None else (self.file.select.metric,)
        return self._results(folder).unknown((self.file.metric, *chosen_by))

    def warned(self, folder: SweepFolder) -> list[str]:
        """Return a line for each run with warnings in its log, for the screen only: logs are private, and so is their content."""
        logs = ((run.description, log, flower_log.warnings_of(log)) for run in self.runs for log in [folder.of(run) / LOG])
        return [f"{name}: {flower_log.num_warnings(warnings)}, in {log}" for name, log, warnings in logs if warnings]

    def _make(self, left: Sequence[SweepRun], folder: SweepFolder, lock: Path, jobs: int | None, progress: "_Progress") -> None:
        begun = False
        try:
            with Signals() as signals, Pool(left, jobs, lock, signals) as pool:
                plan.check(left)  # while they start
                signals.check()
                folder.keep(self.path)
                forget_statement(folder.path)  # after a kill, it would cover less than the runs have charged
                unfinished, begun = folder.left(left), True
                progress.begin(pool.count, left[0].launched, sum(resumed for _, _, resumed in unfinished))
                pool.make(unfinished, progress.ended, progress.running)
        finally:
            if begun:
                self._write(progress.results)

    def _write(self, results: Results) -> None:
        if begun := results.folder.runs():  # first: it covers all charges even if the tables fail
            statement = statement_of(begun)
            RunFolder(results.folder.path).state(statement.to_dict(), str(statement))
        results.write_rows()
        curves = results.curves()
        results.write_table(curves, self.best(results))
        results.draw(curves)

    def best(self, results: Results) -> str:
        """Return the best point by the file's rule, and what its choice is not covered by; empty without a rule or a point.

        If no finished run has the rule's metric, return that instead.
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
            lines.append(f"{choice.metric} is on the test records that chose this point, so its result is too good.")
        return "\n".join(lines)


class _Progress:
    """A line for each run that has ended, and the number of runs left."""

    def __init__(self, tell: Tell, results: Results, num_left: int) -> None:
        self._tell, self.results, self._left = tell, results, num_left
        self._began, self._ended = time.monotonic(), 0
        self._last_line = self._began
        self.failed: list[RunOutcome] = []

    def begin(self, count: int, launched: LaunchRecord, num_resumed: int) -> None:
        """Report the number of runs and workers, and GPUs of this machine that no run uses."""
        more = f"; {num_resumed} of them from a checkpoint" if num_resumed else ""
        each = "1 worker" if launched.workers == 1 else f"{launched.workers} workers"
        self._tell(f"{self._left} runs to make, {count} at once, {each} each{more}")
        gpus = 0 if launched.gpus_per_worker else preflight.num_gpus() or 0
        if line := unused_gpus(gpus, "gpus-per-worker = 1 to its file", user="sweep"):
            self._tell(line)

    def running(self, runs: Sequence[SweepRun]) -> None:
        """Report from time to time the rounds of the current runs, and the number of runs left."""
        now, done, parts = time.monotonic(), float(self._ended), []
        if now < self._last_line + _PROGRESS_SECONDS:
            return
        for run in runs:
            rows = read_metrics(self.results.folder.of(run))
            last = rows[-1] if rows else {}
            if isinstance(total := last.get("num-rounds"), int) and total > 0 and last.get("round"):
                done += min(last["round"] / total, 1.0)
                parts.append(f"{run.description}: {round_text(last)}")
        if parts:
            self._last_line = now
            seconds = (now - self._began) / done * (self._ended + self._left - done)
            self._tell(f"{'; '.join(parts)}; {self._left} left, about {clock(seconds)}")

    def ended(self, outcome: RunOutcome) -> None:
        """Report the outcome of a run, and write the results so far."""
        folder = self.results.folder.of(outcome.run)
        self._left, self._ended, self._last_line = self._left - 1, self._ended + 1, time.monotonic()
        if outcome.status == "completed" and not is_finished(folder):
            outcome = replace(outcome, status="failed", details="the app has recorded no run")
        if outcome.status == "completed":
            numbers = {key: value for row in read_metrics(folder) for key, value in row.items()}
            warnings = flower_log.warnings_of(folder / LOG)
            warned = [flower_log.num_warnings(warnings)] if warnings else []
            result = ", ".join([*quantities(numbers), *warned, clock(outcome.seconds)])
        else:
            self.failed.append(outcome)
            reason = outcome.details.strip().splitlines() or ["no reason given"]
            result = f"{outcome.status.upper()}: {reason[-1]}; its log is {folder / LOG}"
        seconds = (time.monotonic() - self._began) / self._ended * self._left
        rest = f"{self._left} left, about {clock(seconds)}" if self._left else "none left"
        num_runs = len(self.results.runs)
        self._tell(f"[{num_runs - self._left}/{num_runs}] {outcome.run.description}: {result}; {rest}")
        self.results.write_rows()
