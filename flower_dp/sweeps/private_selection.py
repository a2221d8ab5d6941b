"""Private selection of one run: K is drawn, K runs are made in secret, and only the best one is shown.

The draw is stored before the first run and never shown, so an interruption can't redraw it. A run that fails, has no score, or
has charged more than its plan counts as worse than all others, and is never shown. A run that fails before any client is asked to
train (for example, if Ray can't start) ends the selection with an error; the repeated command resumes with the same runs.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flower_dp.core import dp_events, metric_columns
from flower_dp.core.formatting import format_epsilon, format_epsilon_at_delta
from flower_dp.privacy import selection
from flower_dp.privacy.accounting import PrivacyCost
from flower_dp.privacy.selection import PoissonRunCount, RunCountLaw
from flower_dp.privacy.statement import Adversary, PrivacyStatement
from flower_dp.reporting.past_run import RunContents, read_past_run
from flower_dp.running.plugins import event_against_outsiders
from flower_dp.running.preflight import default_workers
from flower_dp.running.run_folder import STATEMENT_JSON, RunFolder, is_finished, write_whole
from flower_dp.running.signals import Signals
from flower_dp.sweeps import plan
from flower_dp.sweeps.file import SelectionRule, SweepFile, read
from flower_dp.sweeps.folder import FILE, RUNS, SweepFolder
from flower_dp.sweeps.plan import SweepRun
from flower_dp.sweeps.pool import Pool
from flower_dp.sweeps.sweep import Tell
from flower_dp.sweeps.trials import MARK, SelectionMark, SelectionTrials, Trial, equalize_mtimes, publish

# Folders of the runs that must not be seen, and of the run that is shown.
PRIVATE, CHOSEN = "private", "chosen"
# Exceeds the rounding between a plan's epsilon and that of a run with the same charges.
_ROUNDING = 1e-9
# In the `not_covered` of one run's statement; the statement of a choice covers this choice, and no other.
_ANY = "the choice of settings"
_NOT_COVERED = (
    "Participants and the server: they see every run, so against them, and in device ledgers, the costs of all runs add up.",
    "The duration of the choice, the machine's load meanwhile, and whatever was looked at in its folder before it was made.",
    "Another choice: to delete the folder and choose again costs again, whatever is done with the results.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Settings that each run may draw.

    Attributes:
        run: run with the settings; its seed is not used.
        event: the most that such a run may be charged, against outsiders.
        statement: forecast of such a run's statement.
    """

    run: SweepRun
    event: dp_events.DpEvent
    statement: PrivacyStatement

    @property
    def outsiders(self) -> Adversary:
        """The cost of one run against outsiders."""
        return next(adversary for adversary in self.statement.adversaries if adversary.name == "outsiders")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSelection:
    """A private choice among the points of a sweep's file.

    Attributes:
        path: path of the file.
        file: content of the file.
        candidates: candidates, one for each point.
        choice: rule that compares runs.
        number: law of K, the number of runs.
        cost: cost of the choice against outsiders.
    """

    path: Path
    file: SweepFile
    candidates: tuple[Candidate, ...]
    choice: SelectionRule
    number: RunCountLaw
    cost: PrivacyCost

    @classmethod
    def read(cls, path: Path) -> "PrivateSelection":
        """Read a sweep's file, and account for the choice.

        Raises:
            ValueError: with one line for each error; or if the choice has no finite epsilon.
        """
        file = read(path)
        choice, number = _checked(file)
        workers = file.workers or max(1, default_workers() // math.ceil(number.mean))
        # Workers are fixed by K's mean, not by K: a run must show nothing that depends on K.
        file = replace(file, workers=workers)
        candidates, errors = [], plan.PointErrors(len(file.points))
        for run in plan.planned(file, workers):
            with errors.of(run.label):
                if run.config.get("server-ledger"):
                    raise ValueError("server-ledger: would reveal the number of runs; leave it out")
                event, statement = event_against_outsiders(run.target)
                candidates.append(Candidate(run=run, event=event, statement=statement))
        errors.refuse()
        first = candidates[0].statement
        for key in ("unit", "relation", "delta"):
            if len({getattr(candidate.statement, key) for candidate in candidates}) > 1:
                raise ValueError(f"points: differ in {key}; give all points one {key}, since a choice has one epsilon")
        cost = selection.epsilon(
            [candidate.event for candidate in candidates], number, delta=first.delta, relation=first.relation
        )
        if not math.isfinite(cost.epsilon):
            raise ValueError("points: one of them is not private, so no choice among them is; leave it out")
        return cls(path=path, file=file, candidates=tuple(candidates), choice=choice, number=number, cost=cost)

    @property
    def description(self) -> str:
        """The rule and the cost of the choice, as text."""
        points = f"{len(self.candidates)} points" if len(self.candidates) > 1 else "1 point"
        most = max(candidate.outsiders.epsilon for candidate in self.candidates)
        return (
            f"The best of K runs by {self.choice.metric} ({self.choice.mode}), each with one of {points}, drawn anew; K is "
            f"{law_in_words(self.number)}. It costs {format_epsilon_at_delta(self.cost.epsilon, self.cost.delta)} "
            f"({self.cost.relation}), against those who see the chosen run alone; one run costs at most {format_epsilon(most)}."
        )

    def make(self, folder: SweepFolder, tell: Tell, *, jobs: int | None = None) -> None:
        """Make the runs, and leave the chosen one and the statement in the folder. Report nothing of any run.

        A choice is made once: if it was made but not fully shown, show the rest. If it was not made, resume it.

        Raises:
            ValueError: if settings are refused, or the folder holds something else; then nothing was started.
            LaunchError: if a run failed before any client was asked to train.
            Interrupted: if a signal came; no process is left.
        """
        with folder.locked() as lock:
            content, kept = self.path.read_bytes(), folder.path / FILE
            hidden, mark = SelectionTrials(folder.path / PRIVATE), SelectionMark(folder.path / MARK)
            if kept.is_file() and kept.read_bytes() != content:
                raise ValueError(f"{folder.path}: was made with another {FILE}; put that file back, or take another folder")
            if mark.is_shown:
                self._clear(folder, hidden)
                tell("The choice was made before; it is not made again.")
                return
            begun = folder.runs() or (not hidden.exists and any((hidden.path / RUNS).glob("*")))
            if mark.is_open and (begun or (folder.path / STATEMENT_JSON).exists()):
                raise ValueError(f"{folder.path}: holds runs that may have been looked at; take another folder")
            if not mark.is_open and not hidden.exists:
                raise ValueError(f"{folder.path}: the choice was made, and {PRIVATE} with its runs is gone; take another folder")
            plan.check([candidate.run for candidate in self.candidates])
            write_whole(kept, content)
            trials = hidden.trials() if hidden.exists else hidden.draw(self.number, len(self.candidates))
            tell(self.description)
            tell("Nothing is shown before the choice is made.")
            if mark.is_open:
                if left := hidden.left([self._run(trial) for trial in trials]):
                    self._make(left, lock, jobs or self.file.jobs, hidden)
                mark.make(self._best(trials, hidden))
            self._show(folder, hidden, mark.among(trials))
            mark.show()
            self._clear(folder, hidden)

    def _make(self, left: Sequence[tuple[SweepRun, Path, bool]], lock: Path, jobs: int | None, hidden: SelectionTrials) -> None:
        with Signals() as signals, Pool([run for run, _, _ in left], jobs, lock, signals) as pool:
            pool.make(left, hidden.ended)

    def _run(self, trial: Trial) -> SweepRun:
        file = replace(self.file, points=(self.candidates[trial.point].run.point,), seeds=(trial.seed,))
        return replace(plan.planned(file, 1)[0], name=trial.name)

    def _best(self, trials: Sequence[Trial], hidden: SelectionTrials) -> str | None:
        """Return the name of the run with the best score; None if no run may be shown."""
        scores = {trial.name: self.score(hidden.path / RUNS / trial.name, trial, hidden) for trial in trials}
        best = max(scores, key=lambda name: scores[name], default=None)
        return None if best is None or scores[best] == -math.inf else best

    def _show(self, folder: SweepFolder, hidden: SelectionTrials, best: Trial | None) -> None:
        """Write the chosen run and its statement. After an interruption, write the same ones again."""
        shutil.rmtree(folder.path / RUNS, ignore_errors=True)
        if best is None:
            statement = self._statement(self.candidates[0], {}, chosen=False)
            (folder.path / RUNS).mkdir(mode=0o700)
        else:
            run = read_past_run(hidden.path / RUNS / best.name)
            statement = self._statement(self.candidates[best.point], run.statement, chosen=True)
            publish(run, statement, folder.path / RUNS / CHOSEN)
        RunFolder(folder.path).state(statement.to_dict(), str(statement))

    def _clear(self, folder: SweepFolder, hidden: SelectionTrials) -> None:
        """Delete everything that was not chosen, and equalize the file times that tell when the chosen run was made."""
        # Before the deletion, so that a crash in between shows no times; and after it, since it changes the folder's own time.
        equalize_mtimes(folder.path, PRIVATE)
        if hidden.path.exists():
            shutil.rmtree(hidden.path)
        equalize_mtimes(folder.path, PRIVATE)

    def score(self, folder: Path, trial: Trial, hidden: SelectionTrials) -> float:
        """Return a run's score; higher is better. -inf: the run must not be shown."""
        if hidden.failed(trial.name) or not is_finished(folder):
            return -math.inf
        run = read_past_run(folder)
        series = run.series(self.choice.metric)
        value = series[max(series)] if series else math.nan
        if not (math.isfinite(value) and self._as_planned(run, self.candidates[trial.point])):
            return -math.inf
        return value if self.choice.mode == "max" else -value

    def _as_planned(self, run: RunContents, candidate: Candidate) -> bool:
        """Return whether a run has cost no more than its plan, for the same unit, relation and delta."""
        guarantee, most = run.guarantee, candidate.outsiders.epsilon * (1 + _ROUNDING)
        adversaries = run.statement.get("adversaries", ())
        epsilon = next((adversary["epsilon"] for adversary in adversaries if adversary["name"] == "outsiders"), None)
        same = all(guarantee.get(key) == getattr(candidate.statement, key) for key in ("unit", "relation", "delta"))
        return same and guarantee.get("private") is True and epsilon is not None and epsilon <= most

    def _statement(self, candidate: Candidate, run: Mapping[str, Any], *, chosen: bool) -> PrivacyStatement:
        """Return the statement of the choice: the plan of the chosen run, with the incidents of that run."""
        planned, outsiders = candidate.statement, candidate.outsiders
        view = f"of the chosen run: {outsiders.view}; nothing of any other run, nor the number of runs"
        return replace(
            planned,
            method=f"{planned.method}, the best of K runs" if chosen else "The best of K runs: nothing was released",
            protected_against="outsiders, who see the chosen run alone",
            epsilon=self.cost.epsilon,
            accountant=self.cost.accountant,
            paper_epsilon=None,
            num_charged_rounds=run.get("guarantee", {}).get("num_charged_rounds", 0),
            assumptions=(
                *planned.assumptions,
                f"K is {law_in_words(self.number)}, drawn in secret. Every run draws one of {len(self.candidates)} points "
                "uniformly, its own seed and its own noise.",
                f"Runs are compared by {self.choice.metric} ({self.choice.mode}), "
                + ("on test records that are public." if not columns_private(self.choice.metric) else "which each run releases."),
                "A run that fails counts as the worst and is not shown.",
            ),
            not_covered=(
                *(text.replace(_ANY, "another choice of settings") for text in run.get("not_covered", planned.not_covered)),
                *_NOT_COVERED,
            ),
            incidents=tuple(run.get("incidents", ())),
            adversaries=(
                replace(outsiders, view=view, epsilon=self.cost.epsilon, accountant=self.cost.accountant, paper_epsilon=None),
            ),
            epsilon_by_release={},
            clients=None,
            joint=None,
        )


def law_in_words(number: RunCountLaw) -> str:
    """Return the law of K as text."""
    if isinstance(number, PoissonRunCount):
        return f"Poisson with mean {number.mean:g}"
    if number.shape in (0, 1):
        return f"{'geometric' if number.shape else 'logarithmic'} with mean {number.mean:g}"
    return f"truncated negative binomial with shape {number.shape:g} and mean {number.mean:g}"


def columns_private(metric: str) -> bool:
    """Return whether a metric comes from private evaluations, for which the run's ledger is charged."""
    return metric.startswith("private-")


def _checked(file: SweepFile) -> tuple[SelectionRule, RunCountLaw]:
    """Return the rule of the choice, and the law of the number of runs.

    Raises:
        ValueError: if the file lacks them, or its metric is covered by no epsilon.
    """
    choice, private = file.select, file.private_selection
    if private is None:
        raise ValueError("private-selection: is missing; --private-selection needs [private-selection] with a mean")
    if choice is None:
        raise ValueError("select: is missing; --private-selection needs the metric by which a run is chosen")
    if len(file.seeds) > 1:
        raise ValueError("seeds: must not be set with --private-selection, which draws a seed for every run; leave them out")
    private_metric = columns_private(choice.metric)
    if metric_columns.is_reserved(choice.metric) and not private_metric:
        raise ValueError(f"select.metric={choice.metric}: must be a result of a run, such as private-accuracy")
    if not (private_metric or private.public_test_data):
        public = "say private-selection.public-test-data = true if these records are public"
        raise ValueError(
            f"select.metric={choice.metric}: is on test records; choose by a private evaluation (private-accuracy), or {public}"
        )
    return choice, private.number
