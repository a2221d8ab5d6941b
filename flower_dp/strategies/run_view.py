"""What a strategy's run has cost and brought so far, to read."""

from collections.abc import Mapping

from flower_dp.privacy.charges import Charges
from flower_dp.strategies.releases.replies import MissingReplies
from flower_dp.strategies.rules import MethodRules
from flower_dp.strategies.run_state import RoundReport
from flower_dp.strategies.session import Session


class RunView:
    """The figures of the run of a strategy, which is this class with all that makes a run."""

    _session: Session

    @property
    def rules(self) -> MethodRules:
        """The method's rules, of this run's clients and rounds as far as they are known."""
        return self._session.rules

    @property
    def charges(self) -> Charges:
        """What the run was charged, of which everything else follows: a value."""
        return self._session.log.charges

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return self.rules.about.num_clients

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return self.rules.about.delta

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all rounds charged so far, quick to compute; the statement has the tight value."""
        return self._session.epsilon

    @property
    def rounds(self) -> tuple[RoundReport, ...]:
        """The numbers of every round. Don't publish them as they are: see `RoundReport.public`."""
        return self._session.record.rounds

    @property
    def incidents(self) -> tuple[str, ...]:
        """What happened, in words."""
        return self._session.record.incidents

    @property
    def missing(self) -> MissingReplies:
        """The number of requested updates that did not count, by reason."""
        return self._session.record.missing

    @property
    def client_metrics(self) -> Mapping[int, Mapping[str, float]]:
        """Means of the training metrics that clients were asked for, by round; they are not private."""
        return self._session.record.client_metrics

    @property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Value and standard error of every metric of private evaluations, by round."""
        return self._session.record.evaluations

    @property
    def cohort_is_secret(self) -> bool:
        """Whether an epsilon holds only if nobody knows who trains, or evaluates, in a round."""
        return self._session.cohort_is_secret

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sampling comes from a fixed seed; the run is not private then."""
        return self._session.seeded_noise

    def line_of(self, server_round: int) -> dict[str, int | float]:
        """Return a round's numbers for people to see: `RunState.line_of`."""
        return self._session.record.line_of(server_round)
