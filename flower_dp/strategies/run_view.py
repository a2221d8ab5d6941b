"""The read-only view of a strategy's run: its costs and results so far."""

from collections.abc import Mapping

from flower_dp.privacy.charges import Charges
from flower_dp.strategies.releases.replies import MissingReplies
from flower_dp.strategies.rules import MethodRules
from flower_dp.strategies.run_state import RoundReport
from flower_dp.strategies.session import Session


class RunView:
    """The read-only properties of a strategy's run; base class of every strategy."""

    _session: Session

    @property
    def rules(self) -> MethodRules:
        """The method's rules, for the clients and rounds of this run as far as they are known."""
        return self._session.rules

    @property
    def charges(self) -> Charges:
        """The charges of the run, as an immutable value; all costs follow from them."""
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
        """A quick upper bound of the cost of all rounds charged so far; the statement has the accountant's own value."""
        return self._session.epsilon

    @property
    def rounds(self) -> tuple[RoundReport, ...]:
        """The numbers of every round. Don't publish them as they are: see `RoundReport.public`."""
        return self._session.record.rounds

    @property
    def incidents(self) -> tuple[str, ...]:
        """The incidents of the run, as text."""
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
        """Return a round's numbers for display: `RunState.line_of`."""
        return self._session.record.line_of(server_round)
