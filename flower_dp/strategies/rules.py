"""The rules of one method on the server, as the strategy runs it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypedDict, cast

import numpy as np
from flwr.serverapp.strategy import Strategy

from flower_dp.core import checks
from flower_dp.core.noise import Generator
from flower_dp.privacy.charges import Charge
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.evaluation import Evaluation, LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.releases.release import Release, RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.run_state import RunFacts, RunState
from flower_dp.wire import EVALUATION

# Takes the public numbers of a round.
OnRound = Callable[[Mapping[str, Any]], None]


class StrategyOptions(TypedDict, total=False):
    """The arguments of every strategy besides those of its method.

    Attributes:
        report_client_metrics: whether to request training metrics, which are not private; the statement then says so.
        registration_timeout: seconds to wait for the clients; 600 by default.
        noise_seed: seed of fixed noise and sampling, for tests only; the run is then not private.
        frozen_arrays: names of the model's arrays that are sent and never trained, clipped or noised, such as the causal mask of
            a stock model's state_dict. The server refuses a reply in which one differs.
        evaluation: private evaluation on clients' own data: `PrivateEvaluation` for methods that release one noised sum,
            `LocalEvaluation` for methods with local DP.
        server_optimizer: a Flower strategy that moves the model by the noised mean, such as FedAdam: see `ServerOptimizer`.
        max_clients_per_node: maximum number of clients that one node may name; a node that names more gets no request. None: at
            the start the maximum of the whole run, later the number of the largest node of the start. Set 1 if every node is a
            device.
        max_new_clients: maximum number of clients beyond `num_clients` in the whole run. None: `num_clients`. It is read with
            Poisson or full sampling and placement='central' only: there neither draw nor cost depends on the number of clients.
            The mean then moves at most (num_clients + max_new_clients) / num_clients times as far as by `num_clients` clients.
            In all other cases exactly `num_clients` clients take part.
        on_round: function, or writer of `flower_dp.running.trackers`, that is called with the public numbers of every round and
            of round 0, the initial model: those of the line in a run folder's `metrics.jsonl`. An error in it is logged; the run
            continues. If it has methods `open` and `close`, they are called before and after the run; an error in `open` ends the
            run before any request.
        ledger: path of a server's ledger (`flower_dp.privacy.store.Store`) that several runs on the same clients share. Every
            charge is on the disk before its messages leave. The statement has the joint epsilon of all runs. The run ends before
            a round that the ledger's budget, if it has one, does not cover. None: this process alone keeps the charges.
    """

    report_client_metrics: bool
    registration_timeout: float
    noise_seed: int | None
    frozen_arrays: Sequence[str]
    server_optimizer: Strategy | None
    evaluation: PrivateEvaluation | LocalEvaluation | None
    max_clients_per_node: int | None
    max_new_clients: int | None
    on_round: OnRound | None
    ledger: str | os.PathLike[str] | None


def check_options(owner: str, options: StrategyOptions) -> None:
    """Refuse unknown options and invalid values.

    Raises:
        TypeError: for an unknown option.
        ValueError: if a value is invalid; the message names option and value.
    """
    if unknown := sorted(set(options) - set(StrategyOptions.__annotations__)):
        known = ", ".join(StrategyOptions.__annotations__)
        raise TypeError(f"{owner}: unexpected keyword argument {unknown[0]!r}; besides the method's own: {known}")
    checks.flag("report_client_metrics", options.get("report_client_metrics", False))
    checks.number("registration_timeout", options.get("registration_timeout", 600.0), above=0)
    if (most := options.get("max_clients_per_node")) is not None:
        checks.integer("max_clients_per_node", most, at_least=1)
    if (most := options.get("max_new_clients")) is not None:
        checks.integer("max_new_clients", most, at_least=0)
    if (on_round := options.get("on_round")) is not None and not callable(on_round):
        raise checks.bad("on_round", on_round, "a function of a round's numbers, such as TensorBoard(folder)")
    if (ledger := options.get("ledger")) is not None and not (isinstance(ledger, str | os.PathLike) and os.fspath(ledger)):
        raise checks.bad("ledger", ledger, "the path of a server's ledger, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFacts:
    """The facts of a method that do not change during a run.

    Attributes:
        title: the method's name for people.
        num_clients: number of clients.
        delta: the delta at which epsilon is stated.
        stock_refusal: reason why stock clients can't run the method; None if they can.
    """

    title: str
    num_clients: int
    delta: float
    stock_refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUpdate:
    """The result of a round by a method.

    Attributes:
        vector: the next global model [d], with all noise that the server must add.
        releases: the next states of the method's releases, by name.
        own: the method's own next state.
        charges: further charges of the new model, such as that of NbAFL's broadcast. They are stored before the model leaves.
    """

    vector: np.ndarray
    releases: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    charges: tuple[Charge, ...] = ()


class MethodRules(Protocol):
    """One method on the server: its releases, and the next model that it computes from them.

    Rules see names, vectors and numbers, never messages. Rules never change: the state of the run has everything that does. A
    method whose `ModelUpdate` has a charge also has `planned(charges, server_round, names)`. It returns the most that this charge
    can be, for a forecast.

    Attributes:
        about: facts of the method.
        releases: the release of every round, then that of private evaluations
            (`flower_dp.strategies.evaluation.Evaluation`), if any.
    """

    @property
    def about(self) -> MethodFacts: ...  # noqa: D102
    @property
    def releases(self) -> tuple[Release, ...]: ...  # noqa: D102

    def with_clients(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        """Return the rules of a run of these clients (empty: not known yet) and this number of rounds (None: not known yet).

        Raises:
            ValueError: if these clients can't run the method, or not for so many rounds.
        """

    def stop_reason(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        """Return why the budget does not cover this round, or None.

        The strategy calls it before the cohort is drawn (`cohort_size` None), and again after.
        """

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the next global model, with noise drawn from `rng`, its charges and the method's next states.

        Raises:
            RoundDiscarded: if nothing may be released, or the result would be unusable.
        """

    def public_metrics(self, state: RunState, now: RoundRequest | None) -> Mapping[str, float]:
        """Return public numbers by name: "epsilon", a quick upper bound of the cost of all charges, and numbers of the round.

        Args:
            state: state of the run.
            now: the round that has just given a model, whose numbers are reported; None for none.
        """

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the approximate norm of the noise in the model of round 1, and the largest norm of the mean without it.

        The strategy calls it after the client query. The norms are for all replies of an average cohort.

        Args:
            dimension: length of the model's vector.
        """

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the privacy statement on all charges."""


def evaluation_of(rules: MethodRules) -> Evaluation | None:
    """Return the private evaluations of a method; None without them."""
    evaluations = [release for release in rules.releases if release.name == EVALUATION]
    return cast("Evaluation", evaluations[0]) if evaluations else None
