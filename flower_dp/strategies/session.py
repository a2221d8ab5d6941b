"""One run of a method, the only object that changes. Steps are functions (`run`); a session makes their effects, in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.core.noise import Generator, noise_generator
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.private_file import LedgerError
from flower_dp.strategies import diagnostics, run
from flower_dp.strategies.checkpoint import Checkpoint
from flower_dp.strategies.evaluation import Evaluation
from flower_dp.strategies.exchange import Exchange, Letter, PendingRound
from flower_dp.strategies.exchange.stream import Replies
from flower_dp.strategies.journal import Journal
from flower_dp.strategies.log import ChargeLog, MemoryLog, StoreLog
from flower_dp.strategies.population.client_manager import ClientManager, KnownClients
from flower_dp.strategies.population.client_query import is_simulation
from flower_dp.strategies.population.eligibility import query_clients
from flower_dp.strategies.releases.correlated_noise import SeparatedSum
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.local_releases import LocalReleases
from flower_dp.strategies.releases.release import Release, RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.rules import MethodRules, evaluation_of
from flower_dp.strategies.run_state import RunState
from flower_dp.strategies.server_optimizer import ServerOptimizer
from flower_dp.strategies.writer import Writer

log = logging.getLogger("flwr")

_SEEDED = "replies with noise from a fixed seed were refused: for the clients that sent them nothing is stated against the server"

# A single device may lie: its report becomes an incident and ends no run.
_OLDER = (
    "A device reports a second request for a reply that it had already counted. Either a message arrived twice, or the server's "
    "ledger is an older copy; then more was released than this statement covers."
)


class Session:
    """The current run: its state, its log of charges, and requests that still wait for replies.

    The effects of a round have one order: its charge is in the log, the secret state of its noise is on the disk, its messages
    leave. Then its result is released, and a snapshot is taken. So a crash overstates the cost, and nothing is drawn or released
    twice.

    Attributes:
        rules: the method's rules, for the clients and rounds of this run as far as they are known.
        pending: open rounds by release name, until their replies are added up. They belong to this process alone.
        log: log of the run's charges, on a ledger or in the memory of this process.
        writer: writer of the checkpoints from which the run can resume.
        journal: journal of the run inside `start`; None outside of it.
        finished: number of charges of each release that have their statement already.

    Args:
        rules: the method's rules.
        exchange: the way of the rows to the server, as one sum.
        optimizer: server optimizer that moves the model by what was released; None: the method itself does.
        noise_seed: seed of fixed noise and sampling, for tests only.
        ledger: path of the ledger that this run shares with others. None: the run's own beside its checkpoints, if it has any.
    """

    def __init__(
        self,
        rules: MethodRules,
        exchange: Exchange,
        *,
        optimizer: ServerOptimizer | None = None,
        noise_seed: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        self.rules, self._rules, self.exchange, self.noise_seed, self.ledger = rules, rules, exchange, noise_seed, ledger
        self.journal: Journal | None = None
        self.finished: Mapping[str, int] = {}
        self._optimizer = optimizer
        self._manager: ClientManager | None = None
        self._simulated = False
        self._own = RunState()
        self._initial = replace(self._own, optimizer=None if optimizer is None else optimizer.state)
        self.pending: dict[str, PendingRound] = {}
        self.log: ChargeLog = MemoryLog(private=not self.seeded_noise)
        self.writer = Writer()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the open rounds: a round is charged once, so of several copies only the original may release it."""
        return {**vars(self), "pending": {}}

    # From one run to the next

    def begin(self) -> None:
        """Start a new run with its own charges; those of the previous run stay in the joint epsilon."""
        self.pending, self.finished, self._manager = {}, {}, None
        self._set(self._initial, self._rules)
        self.forget_charges()

    def forget_charges(self) -> None:
        """Give a new run its own charges; those of the previous run stay in the joint epsilon."""
        if isinstance(self.log, StoreLog | MemoryLog):
            self.log.close()
            before = self.log if isinstance(self.log, MemoryLog) else self.log.memory
            self.log = MemoryLog(private=not self.seeded_noise, before=before)

    def open_ledger(self) -> None:
        """Open the run's ledger, once: the shared one, or else the one beside its checkpoints."""
        if isinstance(self.log, StoreLog) or (path := self.ledger or self.writer.ledger()) is None:
            return
        if charged := self.log.charges.numbers():
            counts = ", ".join(f"{number} x {name}" for name, number in charged.items())
            raise LedgerError(
                f"ledger {path}: this run was charged {counts} elsewhere, and the ledger would lack it; begin() starts a new run"
            )
        checkpoint, about = self.writer.found, self.rules.about
        self.log = StoreLog(
            path,
            method=about.title,
            delta=about.delta,
            private=not self.seeded_noise,
            run=checkpoint.run if checkpoint else "",
            memory=self.log if self.ledger is None and isinstance(self.log, MemoryLog) else None,
        )
        self.writer.run = self.log.run

    @property
    def knows_clients(self) -> bool:
        """Whether the nodes have been queried for their clients."""
        return self._manager is not None

    def known_clients(self, grid: Grid, **limits: Any) -> KnownClients:
        """Return the clients as they are now: nodes may have joined, left or rejoined since the last round.

        Args:
            grid: the nodes.
            limits: limits of the first query: see `query_clients`.
        """
        if self._manager is not None:
            return self._manager.known_clients(grid)
        self.open_ledger()
        self._simulated = is_simulation(grid)
        self._manager, known = query_clients(grid, self.rules, on_shared_ledger=self.ledger is not None, **limits)
        if isinstance(self.training, SeparatedSum) and self.training.past(self.current) and (names := known.named_by_node):
            raise ValueError(
                f"client {names[0]!r} is named by its node's id, which is new in a resumed run: its participations would count "
                "for another name; give every client its own name, such as privacy_mod(name=...)"
            )
        self.register_clients(known.names)
        for release in self.rules.releases:  # refuses clients whom a release can't draw from, before any charge
            _, state = release.cohort(self.current, known.names, self.generator("check", release.name))
            if release.name not in self._own.releases:  # a run that is killed in its first round resumes from this state
                self._own = self._own.with_release(release.name, state)
        return known

    def register_clients(self, names: tuple[str, ...] | None = None, num_rounds: int | None = None) -> None:
        """Set the clients of the run and its number of rounds; None leaves either unchanged.

        Raises:
            ValueError: if these clients can't run the method, or not for so many rounds.
        """
        planned = self._own.planned_rounds if num_rounds is None else num_rounds
        self.rules = self.rules.with_clients(self._own.names if names is None else names, planned)
        # Only methods with terms for each client keep the names: their clients are fixed at the start.
        known = tuple(self.training.terms) if isinstance(self.training, LocalReleases) else ()
        self._own = replace(self._own, names=known, planned_rounds=planned)

    @property
    def _run(self) -> str:
        """The id of the run, also if the run began in another process."""
        return self._own.run or self.log.run

    @property
    def current(self) -> RunState:
        """The state with the charges of the log, as the steps need it."""
        return replace(self._own, charges=self.log.charges)

    @property
    def state(self) -> RunState:
        """The state from which this run resumes, as one value. Assign an earlier state to continue from it.

        Raises:
            RuntimeError: if a round is open: another state would lack its charge.
            LedgerError: if this run has other charges than the state: its statement would lack them.
            ValueError: if another strategy made the state: its charges would get another cost.
        """
        optimizer = None if self._optimizer is None else self._optimizer.state
        return replace(self.current, optimizer=optimizer, run=self._run if self.log.charges.last else "")

    @state.setter
    def state(self, state: RunState) -> None:
        for name, asked in self.pending.items():
            raise RuntimeError(
                f"state: round {asked.now.server_round} of {name} is open, and another state would lack its charge: finish the "
                "round with its replies, or with none, before you set a state; begin() starts a new run"
            )
        if state.secret and not self.log.charges.last:
            raise LedgerError(
                "state: has noise that later rounds use again, and a copy elsewhere may have continued the run; resume it with "
                "checkpoint_dir and resume=True"
            )
        same = (state.names, state.planned_rounds) == (self._own.names, self._own.planned_rounds)
        rules = self.rules if same else self._rules.with_clients(state.names, state.planned_rounds)
        run.check_resumable(rules, state.charges)
        is_charged = bool(self.log.charges.last)
        self.log.check_state(state.charged, state.charges)
        if is_charged and state.run not in ("", self._run):
            raise LedgerError(
                "state: another run made it, which was charged as often as this one: the statement would cover only one of "
                "them; begin() starts a new run"
            )
        self._set(state, rules)
        if not any(state.charged.values()) and isinstance(self.log, MemoryLog):  # a new run
            self.forget_charges()
            self.finished = {}

    def _set(self, state: RunState, rules: MethodRules) -> None:
        self.rules, self._own = rules, replace(state, charges=Charges())
        if self._optimizer is not None and state.optimizer is not None:
            self._optimizer.state = state.optimizer

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint. Later charges stay charged, and their rounds are not released a second time.

        Raises:
            ValueError: if the run had other releases: its charges would get another cost.
        """
        self.open_ledger()
        rules = self._rules.with_clients(checkpoint.state.names, checkpoint.state.planned_rounds)
        run.check_resumable(rules, self.log.charges)
        # `beyond` counts from what the state has: a charge that the state counts is not added again, so resuming is idempotent.
        state = run.resumed(rules, checkpoint.state, self.log.beyond(checkpoint.state.charged))
        self.log.check_state(state.charged, self.log.charges)
        self._set(state, rules)
        self.writer.record_resume(self.state)
        if self.journal is not None:
            self.journal.resume(checkpoint)

    @property
    def record(self) -> RunState:
        """The state without charges and without the optimizer's: reports, incidents, results."""
        return self._own

    def update_state(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self._own = replace(self._own, **changes)

    @property
    def training(self) -> Release:
        """The release of every round."""
        return self.rules.releases[0]

    @property
    def evaluation(self) -> Evaluation | None:
        """Private evaluations; None without them."""
        return evaluation_of(self.rules)

    @property
    def cohort_is_secret(self) -> bool:
        """Whether an epsilon holds only if nobody knows who trains, or evaluates, in a round."""
        return any(release.cohort_is_secret for release in self.rules.releases)

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sampling comes from a fixed seed."""
        return self.noise_seed is not None

    @property
    def epsilon(self) -> float:
        """An upper bound of the cost of all charges so far, quick to compute."""
        private = not (self.seeded_noise or self._own.not_private)
        return self.rules.public_metrics(self.current, None)["epsilon"] if private else np.inf

    def generator(self, *purpose: object) -> Generator:
        """Return a new generator for one draw of noise or of a cohort; no copy of the strategy can repeat its draw."""
        return noise_generator(self.noise_seed, "server", *purpose)

    # A round of a release

    def draw_cohort(
        self, release: Release, known_clients: KnownClients, *purpose: object
    ) -> tuple[RunState, dict[int, tuple[str, ...]]]:
        """Draw the cohort of a release's next round; return the next state, for `ask`, and the cohort by node."""
        names, places = known_clients.names, None
        if isinstance(release.sampling, MinimumSeparationSampling):  # nothing depends on a sampling rate
            places = known_clients.connected(by_name=not self._simulated)
            names = tuple(names[place] for place in places)
        chosen, after = release.cohort(self.current, names, self.generator(*purpose))
        return self.current.with_release(release.name, after), known_clients.by_node(chosen if places is None else places[chosen])

    def ask(
        self,
        release: Release,
        server_round: int,
        drawn: tuple[RunState, dict[int, tuple[str, ...]]],
        *,
        size: int,
        model: wire.Model,
        known_clients: KnownClients,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        grid: Grid,
        **fields: Any,
    ) -> list[Message]:
        """Charge a release for its cohort, then return the cohort's requests. No request leaves before the charge is stored.

        Args:
            release: the release that is requested.
            server_round: number of the round, from 1.
            drawn: state and cohort by node: see `draw_cohort`.
            size: length of a client's update, or of its metrics.
            model: the model that is sent.
            known_clients: the known clients.
            arrays: the model as it is sent.
            config: config record that is sent with the model.
            grid: grid that sends the messages.
            fields: further fields of the instruction.

        Raises:
            ValueError: if the method can't run with a model of this size; nothing is charged then.
            BudgetSpentError: if the ledger's budget does not cover the charge; nothing is charged then.
            LedgerError: if the charge can't be stored; the run has not been charged then.
        """
        state, cohort = drawn
        if (number := self.log.charges.number(release.name)) != state.charged.get(release.name, 0):
            has = state.charged.get(release.name, 0)
            raise LedgerError(
                f"state: {release.name} was charged {number} times in this run, and the state has {has} of them: the state is "
                "older, or a copy of this strategy has continued the run; begin() starts a new run"
            )
        state, charge, now = run.open_round(
            release,
            state,
            server_round,
            size=size,
            model=model,
            cohort=cohort,
            known_clients=known_clients,
            run=self.log.run,
            rng=self.generator("begin", release.name, server_round),
        )
        # Write-ahead: store the charge, then the secret noise, then count the charge and build the messages. A crash in between
        # overstates the cost, never understates it, and no noise is drawn twice.
        self.log.append(charge)
        if secret := state.secret:
            self.writer.noise(self.log.run, state.charged, secret)
        self._own = replace(state, charges=Charges(), not_private=state.not_private or self.seeded_noise)
        letter = Letter(record_names=known_clients.record_names, arrays=arrays, config=config, fields=fields)
        messages = list(self.exchange.messages(now, letter))  # a list, since Flower's own grid reads them twice
        now = replace(now, bytes_down=sum(wire.content_bytes(message.content) for message in messages))
        sent, limits = tuple(message.metadata for message in messages), release.limits(now)
        self.pending[release.name] = PendingRound(
            now=now, limits=limits, sent=sent, number=charge.number, letter=letter, grid=grid
        )
        return messages

    @property
    def next_round(self) -> int:
        """The number of the next round: every round is charged once, whether or not it was finished."""
        checkpoint = self.writer.found
        return max(self.log.charges.number(self.training.name), 0 if checkpoint is None else checkpoint.server_round) + 1

    def is_charged(self, release: Release, server_round: int) -> bool:
        """Return whether this round of a release, or a later one, was charged before."""
        last = self.log.charges.last.get(("", release.name))
        return last is not None and server_round <= last.server_round

    def awaits_replies(self, release: Release, server_round: int) -> bool:
        """Return whether this round has requests whose replies were not added up yet."""
        return release.name in self.pending and self.pending[release.name].now.server_round == server_round

    def total(self, release: Release, replies: Any) -> tuple[RoundRequest, CollectedReplies]:
        """Check the replies to the requests of a round and add them up, once.

        Raises:
            RuntimeError: if the log has other charges than at the request: a copy of the strategy has continued the run.
        """
        asked = self.pending.pop(release.name)
        if (number := self.log.charges.number(release.name)) != asked.number:
            raise RuntimeError(
                f"state: {release.name} has {number} charges, and round {asked.now.server_round} was charge {asked.number}: "
                "a copy of the strategy has continued the run while the round was open, so the round is not released"
            )
        more = replies.more if isinstance(replies, Replies) else Replies(asked.grid).more
        collected = self.exchange.total(asked, replies, more, seeded=self.seeded_noise)
        for seen, incident in ((collected.seeded_clients, _SEEDED), (collected.repeated, _OLDER)):
            # Reported once, and never if the report could reveal a secret cohort.
            if seen and incident not in self._own.incidents and not self.cohort_is_secret:
                self._own = self._own.happened(incident)
        return asked.now, collected

    def next_model(self, server_round: int, replies: Any) -> tuple[RoundRequest, CollectedReplies, np.ndarray]:
        """Compute the next model from a round's replies, once. Return the round, its replies and the model [d], float32.

        If the round is left out, the model stays the previous one, although the round was charged.

        Raises:
            RuntimeError: if the round has no requests. If no client has sent a usable update in enough rounds in a row: the
                state is then that after the last round with one, and everything charged since stays charged.
            LedgerError: if a further charge of the model can't be stored; nothing is released then.
        """
        release = self.training
        if not self.awaits_replies(release, server_round):
            raise RuntimeError(f"server_round={server_round}: aggregate_train needs configure_train of the same round first")
        now, collected = self.total(release, replies)
        if not any(report.replies for report in self._own.rounds):
            diagnostics.warn_of_unchanged_arrays(now, collected)
        state, made = run.learnt(self.rules, self.current, now, collected, self.generator("noise", server_round))
        vector = now.vector
        if made is not None:
            for charge in made.charges:
                self.log.append(charge)
            try:
                vector = self._moved(now, made.vector)
            except RoundDiscarded as why:
                state = state.happened(f"round {server_round} was left out: {why}")
        if state.incidents != self._own.incidents:
            log.warning("%s", state.incidents[-1])
        state = run.reported(self.rules, release, state, now, collected, vector)
        self._own = replace(state, charges=Charges())
        try:
            diagnostics.check_usable_updates(self._own, self.rules.about.num_clients)
        except RuntimeError:
            self._go_back()
            raise
        return now, collected, vector

    def _moved(self, now: RoundRequest, vector: np.ndarray) -> np.ndarray:
        """Return the next model [d], float32: the method's, or the server optimizer's."""
        optimizer, kept = self._optimizer, None if self._optimizer is None else self._optimizer.state
        try:
            if optimizer is not None:
                vector = optimizer.step(now.server_round, now.layout, now.vector, vector)
            if names := now.layout.overflows(vector):
                raise RoundDiscarded(f"array {names[0]!r} would leave the range of its dtype")
        except RoundDiscarded:
            if optimizer is not None and kept is not None:
                optimizer.state = kept  # else a state that is not finite would discard all later rounds as well
            raise
        return vector.astype(np.float32)

    def add_evaluation(self, server_round: int, replies: Any) -> dict[str, float] | None:
        """Record and return value and standard error of every metric of a private evaluation; None without one."""
        evaluation = self.evaluation
        if evaluation is None or not self.awaits_replies(evaluation, server_round):
            return None
        now, collected = self.total(evaluation, replies)
        rng = self.generator("evaluation", server_round)
        state, metrics = run.evaluated(self.rules, evaluation, self.current, now, collected, rng)
        if isinstance(metrics, RoundDiscarded):
            refusal = next((f"; {reason}" for reason in collected.refused.values()), "")
            log.warning("The evaluation of round %s was left out: %s%s", server_round, metrics, refusal)
        num_clients = self.rules.about.num_clients
        before, after = (diagnostics.evaluation_stop_reason(which, num_clients) for which in (self._own, state))
        if after and not before:
            log.warning("%s; training continues", state.incidents[-1])
        self._own = replace(state, charges=Charges())
        self.writer.evaluated(self.state)
        return None if isinstance(metrics, RoundDiscarded) else metrics

    def _go_back(self) -> None:
        """Return to the state after the last round with a reply."""
        if (answered := self.writer.answered) is None:
            return
        evaluates = not diagnostics.evaluation_stop_reason(self._own, self.rules.about.num_clients)
        state = run.gone_back(self.state, answered.state, evaluates=evaluates)
        self._set(self._with_unfinished_charges(state, answered.state.charged), self.rules)
        self.writer.went_back(self.state)

    def stop(self, server_round: int, reason: str) -> list[Message]:
        """Record, once, that this round and all later ones are not run; return no messages.

        Raises:
            ValueError: if no round was run before: the result would be the initial model.
        """
        self.pending.pop(self.training.name, None)
        if not self._own.ended_before:
            self._own = replace(self._own.happened(f"ended before round {server_round}: {reason}"), ended_before=server_round)
            log.info("%s", self._own.incidents[-1])
        if not self._own.rounds:
            raise ValueError(f"no round was run: {self._own.incidents[-1]}")
        return []

    def charge_interrupted(self) -> None:
        """Record, at the end of the run, the rounds that were charged and not finished."""
        if (last := self.writer.last) is not None:
            self._own = self._with_unfinished_charges(self._own, last.state.charged)

    def _with_unfinished_charges(self, state: RunState, charged: Mapping[str, int]) -> RunState:
        """Return a state whose incidents list every charge beyond these numbers, as charged and not finished."""
        return run.resumed(self.rules, replace(state, charged=charged), self.log.beyond(charged))
