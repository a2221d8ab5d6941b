"""Rules: one method on the server, as the strategy runs it."""

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
        report_client_metrics: ask clients for training metrics, which are not private; the statement says so then.
        registration_timeout: seconds to wait for the clients; 600 by default.
        noise_seed: for tests only: fixed noise and sampling, which makes the run not private.
        frozen_arrays: names of the model's arrays that are sent and never trained, clipped or noised, such as the causal mask of
            a stock model's state_dict. A reply in which one differs is refused.
        evaluation: private evaluation on clients' own data: see `PrivateEvaluation`, for methods that release one noised sum, and
            `LocalEvaluation`, for methods in which every message is private on its own.
        server_optimizer: a Flower strategy that moves the model by the noised mean, such as FedAdam: see `ServerOptimizer`.
        max_clients_per_node: how many clients one node may name; a node that names more is not asked. None: at the start as many
            as may take part in all, later as many as the largest node of the start. Set 1 where every node is a device.
        max_new_clients: how many clients more than `num_clients` may take part in the whole run. None: `num_clients`. It is read
            with Poisson or full sampling and placement='central' only: there neither draw nor cost depends on the number of
            clients. The mean can so be moved at most (num_clients + max_new_clients) / num_clients times as far as by
            `num_clients` clients. In all other cases exactly `num_clients` clients take part.
        on_round: called with the public numbers of every round, those of the line in a run folder's `metrics.jsonl`, and of round
            0, the initial model: a function, or a writer of `flower_dp.running.trackers`. An error in it is logged, and the run
            goes on. If it has methods `open` and `close`, these are called before the run and after it; an error in `open` ends
            the run before any client is asked.
        ledger: the file of a server's ledger (`flower_dp.privacy.store.Store`) that several runs on the same
            clients share. Every charge is on the disk before its messages leave; the statement has the joint epsilon of all runs;
            and the run ends before a round that the ledger's budget, if it has one, does not cover. None: this process alone
            keeps the charges.
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
    """Refuse options that no strategy has, and values that make no sense.

    Raises:
        TypeError: for an option of another name.
        ValueError: naming option and value.
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
    """What a method says of itself.

    Attributes:
        title: its name for people.
        num_clients: how many clients there are.
        delta: the delta at which epsilon is stated.
        stock_refusal: why stock clients can't run it; None if they can.
    """

    title: str
    num_clients: int
    delta: float
    stock_refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUpdate:
    """What a method has made of a round.

    Attributes:
        vector: the next global model [d], with all noise that the server must add.
        releases: the next states of its releases, by name.
        own: what the method keeps from now on.
        charges: what the new model costs besides, such as that of NbAFL's broadcast: charged before the model leaves.
    """

    vector: np.ndarray
    releases: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    charges: tuple[Charge, ...] = ()


class MethodRules(Protocol):
    """One method on the server: its releases, and how the model learns from them.

    Rules see names, vectors and numbers, never messages. They are never changed: all that changes is in the state of the run. A
    method whose `ModelUpdate` has a charge also has `planned(charges, server_round, names)`, which returns the most that this
    charge can be, for a forecast.

    Attributes:
        about: what the method says of itself.
        releases: that of every round, and that of private evaluations (`flower_dp.strategies.evaluation.Evaluation`) if there are
            any.
    """

    @property
    def about(self) -> MethodFacts: ...  # noqa: D102
    @property
    def releases(self) -> tuple[Release, ...]: ...  # noqa: D102

    def with_clients(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        """Return the rules of a run of these clients (none: they are not known yet) and of so many rounds (None: likewise).

        Raises:
            ValueError: if the method can't be run by them, or for so long.
        """

    def stop_reason(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        """Return why the budget does not cover this round, or None; called before (None) and after the cohort is drawn."""

    def next_model(self, state: RunState, now: RoundRequest, collected: CollectedReplies, rng: Generator) -> ModelUpdate:
        """Return the next global model, with noise drawn from `rng`, and what follows from it.

        Raises:
            RoundDiscarded: if nothing may be released, or the result would be unusable.
        """

    def public_metrics(self, state: RunState, now: RoundRequest | None) -> Mapping[str, float]:
        """Return public numbers by their names: "epsilon", an upper bound of what was charged that is quick to compute.

        Args:
            state: of the run.
            now: the round that was just learnt from, whose further numbers are reported; None for none.
        """

    def noise_and_signal_norms(self, dimension: int) -> tuple[float, float]:
        """Return the norm that the noise in the model of round 1 has about, and the largest norm of the mean without it.

        Asked after the client query, for all replies of an average cohort.

        Args:
            dimension: of the model's vector.
        """

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        """Return the privacy statement on all charges."""


def evaluation_of(rules: MethodRules) -> Evaluation | None:
    """Return the private evaluations of a method; None without them."""
    found = [release for release in rules.releases if release.name == EVALUATION]
    return cast("Evaluation", found[0]) if found else None
