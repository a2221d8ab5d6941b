"""Rules: the interface between a method and the strategy, and the data that they exchange."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypedDict, runtime_checkable

import numpy as np
from flwr.serverapp.strategy import Strategy

from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.core.vectors import Layout
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.private_evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.limits import Limits
from flower_dp.strategies.releases.replies import Collected, Missing
from flower_dp.wire import Ask, Model


class Options(TypedDict, total=False):
    """The arguments of every strategy besides those of its method.

    Attributes:
        report_client_metrics: ask clients for training metrics, which are not private; the statement says so then.
        registration_timeout: seconds to wait for the clients; 600 by default.
        noise_seed: for tests only: fixed noise and sampling, which makes the run not private.
        frozen_arrays: names of the model's arrays that are sent and never trained, clipped or noised, such as the causal mask of
            a stock model's state_dict. A reply in which one differs is refused.
        evaluation: private evaluation on clients' own data: see `PrivateEvaluation`, for methods that release one noised sum, and
            `LocalEvaluation`, for methods in which every message is private on its own.
        server_optimizer: a Flower strategy that moves the model by the noised mean, such as FedAdam: see `ServerOptimizer`.
        most_clients_per_node: how many clients one node may name; a node that names more is not asked. None: at the start as many
            as may take part in all, later as many as the largest node of the start. Set 1 where every node is a device.
        most_newcomers: how many clients more than `num_clients` may take part in the whole run, where a method takes newcomers.
            None: `num_clients`. With Poisson or full sampling the mean can so be moved at most
            (num_clients + most_newcomers) / num_clients times as far as by `num_clients` clients.
    """

    report_client_metrics: bool
    registration_timeout: float
    noise_seed: int | None
    frozen_arrays: Sequence[str]
    server_optimizer: Strategy | None
    evaluation: PrivateEvaluation | LocalEvaluation | None
    most_clients_per_node: int | None
    most_newcomers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """The numbers of one round.

    If cohorts are secret (`secret_cohort`), `cohort_size`, `replies`, `bytes_down`, `bytes_up` and `seconds` must stay on the
    server: they reveal how many clients took part, and the epsilon holds only if nobody knows that. `public` leaves them out.

    Attributes:
        server_round: 1, 2, ...
        cohort_size: clients that were asked.
        replies: clients whose updates count.
        bytes_down: bytes of arrays and text sent to nodes.
        bytes_up: bytes of arrays and text in the replies that count.
        bytes_per_client: bytes of arrays that one client sends, as far as public numbers determine them.
        seconds: time from the requests to the new model.
        epsilon: an upper bound of the cost of all rounds so far; the statement has the tight value.
        secret_cohort: whether the size of the cohort is secret.
        cost_per_device: the largest resource cost of a device so far; None if the method counts none.
    """

    server_round: int
    cohort_size: int
    replies: int
    bytes_down: int
    bytes_up: int
    bytes_per_client: float
    seconds: float
    epsilon: float
    secret_cohort: bool
    cost_per_device: float | None = None

    def public(self) -> dict[str, int | float]:
        """Return the numbers that may be published, under names in the style of run-config keys."""
        hidden = ("cohort_size", "replies", "bytes_down", "bytes_up", "seconds") if self.secret_cohort else ()
        left_out = ("server_round", "secret_cohort", *hidden)
        told = {key: value for key, value in asdict(self).items() if key not in left_out and value is not None}
        return {key.replace("_", "-"): value for key, value in told.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a release has asked in the current round: of whom, and with which model.

    Attributes:
        server_round: 1, 2, ...
        ask: what was asked; the limits of the replies follow from it alone.
        model: the model that was sent.
        asked: the clients that were asked, by node.
        bytes_down: bytes of arrays and text sent to nodes.
        started: when.
        stock: whether the nodes are stock clients.
    """

    server_round: int
    ask: Ask
    model: Model
    asked: dict[int, tuple[str, ...]]
    bytes_down: int
    started: float
    stock: bool = False

    @property
    def layout(self) -> Layout:
        """The layout of the arrays that are trained."""
        return self.model.layout

    @property
    def vector(self) -> np.ndarray:
        """The model that was sent [d], float32."""
        return self.model.vector

    @property
    def cohort_size(self) -> int:
        """How many clients were asked."""
        return sum(len(names) for names in self.asked.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts on a run for a statement, besides its ledgers.

    Attributes:
        seeded_noise: whether noise or sampling came from a fixed seed; the run is not private then.
        missing: the number of requested updates that did not count.
        incidents: what happened, in words.
        report_client_metrics: whether clients were asked for metrics, which are not private.
        own_evaluation: whether a subclass asks clients to evaluate, whose metrics are not private.
    """

    seeded_noise: bool
    missing: Missing
    incidents: tuple[str, ...]
    report_client_metrics: bool
    own_evaluation: bool = False


class Rules(Protocol):
    """One method on the server, for one run at a time. Rules see names, vectors and numbers, never messages.

    Attributes:
        name: the method's name on the wire.
        title: the method's name for people.
        stock_refusal: why stock clients can't run the method; None if they can.
        sampling: who takes part in a round.
        num_clients: how many clients there are.
        delta: the delta at which epsilon is stated.
        secret_cohort: whether the epsilon holds only if nobody knows how many clients take part in a round.
        open_population: whether clients beyond those of the first roll call may take part.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def stock_refusal(self) -> str | None: ...  # noqa: D102
    @property
    def sampling(self) -> Sampler: ...  # noqa: D102
    @property
    def num_clients(self) -> int: ...  # noqa: D102
    @property
    def delta(self) -> float: ...  # noqa: D102
    @property
    def secret_cohort(self) -> bool: ...  # noqa: D102
    @property
    def open_population(self) -> bool: ...  # noqa: D102

    # The run

    def begin(self) -> None:
        """Forget the last run."""

    def plan(self, num_rounds: int) -> None:
        """Prepare for up to `num_rounds` rounds, before clients are known."""

    def open(self, names: tuple[str, ...]) -> None:
        """Take the names of all clients, before the first round."""

    # A round, in the order of the calls

    def why_stop(self, server_round: int, cohort_size: int | None) -> str | None:
        """Return why the budget does not cover this round, or None; called before (None) and after the cohort is drawn."""

    def with_budget(self, chosen: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return the indices, among those drawn, of the clients whose budget covers one more reply."""

    def ask(self, length: int, names: tuple[str, ...]) -> Ask:
        """Return what is asked of the clients of a round, of vectors [length]; it is kept with the round.

        Raises:
            ValueError: if the method can't run with a model of this size.
        """

    def charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge the round's releases, before any message of the round is sent."""

    def limits(self, now: Round) -> Limits:
        """Return the limits that the server enforces on the replies: they follow from what was asked, and with which model."""

    def combine(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the next global model [d], with all noise that the server must add, drawn from `rng`.

        Raises:
            RoundLeftOut: if nothing may be released, or the result would be unusable.
        """

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return how many bytes of arrays one client sends, as far as public numbers or private messages determine it."""

    # The cost

    @property
    def charges(self) -> object:
        """All charges in the ledgers, as a comparable value: a new statement is made when it changes."""

    @property
    def epsilon(self) -> float:
        """An upper bound of the epsilon of all charges, quick to compute."""

    def explain(self, facts: RunFacts) -> PrivacyStatement:
        """Return the privacy statement on all charges."""


@runtime_checkable
class ComparesNoise(Protocol):
    """Rules that know before round 1 how their noise compares with what it is added to."""

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        """Return the norm that the noise in the model of round 1 has about, and the largest norm of the mean without it.

        Asked after the roll call, for all replies of an average cohort.

        Args:
            dimension: of the model's vector.
        """


@runtime_checkable
class CountsResources(Protocol):
    """Rules with a resource ledger."""

    @property
    def cost_per_device(self) -> float | None:
        """The largest resource cost of a device so far; None if no costs were given."""
