"""Rules: what a method hands to the strategy, and the facts that pass between them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypedDict, get_type_hints, runtime_checkable

import numpy as np
from flwr.serverapp.strategy import Strategy

from flower_dp.core.noise import Generator
from flower_dp.core.sampling import Sampler
from flower_dp.core.vectors import Layout
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.private_evaluation import PrivateEvaluation
from flower_dp.strategies.replies import Bounds, Collected, Missing
from flower_dp.wire import Model


class Options(TypedDict, total=False):
    """What every strategy takes besides its method's own words.

    Attributes:
        report_client_metrics: ask clients for training metrics, which are not private; the statement says so then.
        registration_timeout: seconds to wait for the clients; 600 by default.
        noise_seed: for tests only: fixed noise and sampling, which makes the run not private.
        frozen_arrays: names of the model's arrays that are sent and never trained, clipped or noised, such as the causal mask of
            a stock model's state_dict. A reply in which one differs is refused.
        evaluation: a private evaluation on clients' own data, with methods of one noised sum: see `PrivateEvaluation`.
        server_optimizer: a Flower strategy that moves the model by the noised one, such as FedAdam: see `ServerOptimizer`.
    """

    report_client_metrics: bool
    registration_timeout: float
    noise_seed: int | None
    frozen_arrays: Sequence[str]
    server_optimizer: Strategy | None
    evaluation: PrivateEvaluation | None


def split(words: Mapping[str, Any], known: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the method's own arguments of a strategy, and its `Options`.

    Raises:
        TypeError: for an argument that the strategy does not take.
    """
    names = get_type_hints(known)
    if unknown := sorted(set(words) - set(names)):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; known are {', '.join(names)}")
    own = {name: value for name, value in words.items() if name not in Options.__annotations__}
    return own, {name: value for name, value in words.items() if name in Options.__annotations__}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round did, in numbers.

    Where cohorts are secret (`secret_cohort`), the first four numbers must not leave the server: they tell how many clients took
    part, which the epsilon counts on nobody to know. `public` leaves them out.

    Attributes:
        server_round: 1, 2, ...
        cohort_size: clients that were asked.
        replies: clients whose updates count.
        bytes_down: bytes of arrays and text sent to nodes.
        bytes_up: bytes of arrays and text in the replies that count.
        bytes_per_client: bytes of arrays that one client sends, as far as they follow from public numbers.
        seconds: from request to model.
        epsilon: an upper bound of the cost of all rounds so far; the statement has the tight value.
        secret_cohort: whether the size of the cohort is secret.
        cost_per_device: resources that the device that spent most has spent so far; None where the method counts none.
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
        """Return the numbers that may be published, by run-config style names."""
        hidden = ("cohort_size", "replies", "bytes_down", "bytes_up") if self.secret_cohort else ()
        left_out = ("server_round", "secret_cohort", *hidden)
        told = {key: value for key, value in asdict(self).items() if key not in left_out and value is not None}
        return {key.replace("_", "-"): value for key, value in told.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round under way: the model that was sent, and the clients that were asked, by node."""

    server_round: int
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
    """What a statement tells of a run besides its ledgers.

    Attributes:
        seeded_noise: whether noise or sampling came from a fixed seed; the run is not private then.
        missing: updates that were asked for and did not count.
        incidents: what happened, in words.
        report_client_metrics: whether clients were asked for metrics, which are not private.
        own_evaluation: whether a subclass asks clients to evaluate, whose metrics are not private.
    """

    seeded_noise: bool
    missing: Missing
    incidents: tuple[str, ...]
    report_client_metrics: bool
    own_evaluation: bool = False


class RoundLeftOut(Exception):  # noqa: N818 (nothing went wrong in the program)
    """A round that was paid for does not change the model; the text says why."""


@runtime_checkable
class SendsBeside(Protocol):
    """Rules that may send a vector beside the model."""

    def beside(self, size: int) -> np.ndarray | None:
        """Return the vector [size], float32, that goes beside the model in the next round; None for none.

        Raises:
            ValueError: if the method can't run with a model of this size.
        """


class Rules(Protocol):
    """One method on the server, for one run at a time. Rules see names, vectors and numbers, never messages.

    Attributes:
        name: the method's name on the wire.
        title: the method's name for people.
        stock_refusal: why clients that know nothing of this package can't run the method; None if they can.
        sampling: who takes part in a round.
        num_clients: how many clients there are.
        delta: the delta at which epsilon is stated.
        clip_norm: norm bound of what every client sends.
        secret_cohort: whether the epsilon counts on nobody knowing how many clients take part in a round.
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
    def clip_norm(self) -> float: ...  # noqa: D102
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
        """Return why this round can't be paid for, None if it can; asked before the cohort is drawn (None), and after that."""

    def able(self, chosen: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return the indices, out of those drawn, of the clients that can pay for one more reply."""

    def charge(self, server_round: int, names: tuple[str, ...]) -> None:
        """Charge the round's releases, before any message of the round leaves."""

    def noise_multiplier(self, names: tuple[str, ...]) -> float:
        """Return the noise multiplier of the release that these clients take part in."""

    def order(self, server_round: int, names: tuple[str, ...], cohort_size: int) -> Mapping[str, Any]:
        """Return the method's own table in the instruction to one node, as JSON can hold it."""

    def bounds(self, now: Round) -> Bounds:
        """Return what the server enforces on the replies."""

    def combine(self, now: Round, collected: Collected, rng: Generator) -> np.ndarray:
        """Return the next global model [d], with all noise that the server owes, drawn from `rng`.

        Raises:
            RoundLeftOut: if nothing may be released, or nothing sensible can be.
        """

    def bytes_per_client(self, now: Round, collected: Collected) -> float:
        """Return how many bytes of arrays one client sends, as far as that follows from public numbers or private messages."""

    # The cost

    @property
    def charges(self) -> object:
        """All that the ledgers hold, as something that compares: statements are made anew when it changes."""

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all that was charged, quick to compute."""

    def explain(self, facts: RunFacts) -> PrivacyStatement:
        """Return the privacy statement of all that was charged."""


@runtime_checkable
class HasOutlook(Protocol):
    """Rules that know before round 1 how their noise compares with what it is added to."""

    def outlook(self, dimension: int) -> tuple[float, float]:
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
        """Resources that the device that spent most has spent so far; None where nothing has a price."""
