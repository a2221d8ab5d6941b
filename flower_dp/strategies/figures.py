"""What a strategy's run has cost and brought so far, to read."""

import math
from collections.abc import Mapping

from flower_dp.strategies.releases.replies import Missing
from flower_dp.strategies.rules import Rules
from flower_dp.strategies.run import Run
from flower_dp.strategies.run_state import RoundReport


class RunFigures:
    """The figures of the run of a strategy, which is this class with all that makes a run.

    Attributes:
        rules: the method's rules, with its ledgers.
    """

    rules: Rules
    _run: Run

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return self.rules.num_clients

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return self.rules.delta

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute; the statement has the tight value."""
        return math.inf if self._run.not_private else self.rules.epsilon

    @property
    def rounds(self) -> tuple[RoundReport, ...]:
        """The numbers of every round. Don't publish them as they are: see `RoundReport.public`."""
        return self._run.record.rounds

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened, in words."""
        return self._run.record.incidents

    @property
    def missing(self) -> Missing:
        """The number of requested updates that did not count, by reason."""
        return self._run.record.missing

    @property
    def client_metrics(self) -> Mapping[int, Mapping[str, float]]:
        """Means of the training metrics that clients were asked for, by round; they are not private."""
        return self._run.record.client_metrics

    @property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Value and standard error of every metric of private evaluations, by round."""
        return self._run.record.evaluations

    @property
    def secret_cohort(self) -> bool:
        """Whether an epsilon holds only if nobody knows who trains, or evaluates, in a round."""
        return self._run.secret_cohort

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sampling comes from a fixed seed; the run is not private then."""
        return self._run.seeded_noise

    def line_of(self, server_round: int) -> dict[str, int | float]:
        """Return a round's numbers for people to see: `RunState.line_of`."""
        return self._run.record.line_of(server_round)
