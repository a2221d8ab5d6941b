"""One run of a method on the server: its state as a value, and the rounds of its releases."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flower_dp import wire
from flower_dp.core.noise import Generator, noise_generator
from flower_dp.strategies import diagnostics
from flower_dp.strategies.exchange import Asked, Exchange, Letter
from flower_dp.strategies.exchange.stream import Replies
from flower_dp.strategies.log import ChargeLog, MemoryLog
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.releases.round import Round, RoundRelease
from flower_dp.strategies.rules import Rules
from flower_dp.strategies.run_checkpoints import RunCheckpoints
from flower_dp.strategies.run_state import RoundReport, RunFacts, RunState
from flower_dp.strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr")

_SEEDED = "replies with noise from a fixed seed were refused: for the clients that sent them nothing is stated against the server"

# One device may say so falsely: it is told, and ends no run.
_OLDER = (
    "a device says that it was asked again for a reply that it had counted: the server's ledger is an older copy, and more was "
    "released than is stated here, or a message came twice"
)


class Run:
    """One run at a time: what was released and what came of it, and what was asked and not answered yet.

    Attributes:
        asked: by the name of a release: what was asked, until the replies are added up. It belongs to this process alone.
        log: keeps the charges where a crash does not reach them.
        checkpoints: from which the run can go on.

    Args:
        rules: the method.
        exchange: how rows get to the server as one sum.
        optimizer: moves the model by what was released; None: the method itself does.
        noise_seed: for tests only: fixed noise and sampling.
    """

    def __init__(self, rules: Rules, exchange: Exchange, optimizer: ServerOptimizer | None, noise_seed: int | None) -> None:
        self.rules, self.exchange, self.noise_seed = rules, exchange, noise_seed
        self._optimizer = optimizer
        self._own = RunState()
        self._initial = self.state
        self.asked: dict[str, Asked] = {}
        self.log: ChargeLog = MemoryLog(private=not self.seeded_noise)
        self.checkpoints = RunCheckpoints(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what was asked: a round is charged once, and of several copies only the original releases it."""
        return {**vars(self), "asked": {}}

    def begin(self) -> None:
        """Begin a new run."""
        self.asked = {}
        self.state = self._initial

    @property
    def state(self) -> RunState:
        """All that this run needs to go on, as one value. Setting an earlier one continues from there.

        Raises:
            RuntimeError: if a round is open: another state would lack its charge.
        """
        optimizer = None if self._optimizer is None else self._optimizer.state
        return replace(self._own, method=self.rules.state, optimizer=optimizer)

    @state.setter
    def state(self, state: RunState) -> None:
        for name, asked in self.asked.items():
            raise RuntimeError(
                f"state: round {asked.now.server_round} of {name} is open, and another state would lack its charge: finish the "
                "round with its replies, or with none, before you set a state; begin() begins a new run"
            )
        self._own = state
        self.rules.state = state.method
        if self._optimizer is not None and state.optimizer is not None:
            self._optimizer.state = state.optimizer

    @property
    def record(self) -> RunState:
        """The state without those of method and optimiser: reports, incidents, results."""
        return self._own

    def note(self, **changes: Any) -> None:
        """Change fields of the state."""
        self._own = replace(self._own, **changes)

    @property
    def releases(self) -> tuple[RoundRelease, ...]:
        """The releases of a round: that of training, and that of private evaluation if there is one."""
        evaluation = self.rules.evaluation
        return (self.rules.training,) if evaluation is None else (self.rules.training, evaluation.release)

    @property
    def num_charged(self) -> tuple[int, ...]:
        """How often each release was charged."""
        return tuple(release.num_charged for release in self.releases)

    @property
    def secret_cohort(self) -> bool:
        """Whether an epsilon holds only if nobody knows how many clients train, or evaluate, in a round."""
        return any(release.secret_cohort for release in self.releases)

    @property
    def seeded_noise(self) -> bool:
        """Whether noise or sampling comes from a fixed seed."""
        return self.noise_seed is not None

    @property
    def not_private(self) -> bool:
        """Whether noise or sampling comes from a fixed seed, or did in a round before: the run is not private then."""
        return self.seeded_noise or self._own.not_private

    def generator(self, *purpose: object) -> Generator:
        """Return a fresh generator for one draw of noise or of a cohort; no copy of the strategy can repeat it."""
        return noise_generator(self.noise_seed, "server", *purpose)

    def facts(self, *, report_client_metrics: bool, own_evaluation: bool) -> RunFacts:
        """Return the facts for the statement, besides the ledgers."""
        return RunFacts(
            seeded_noise=self.not_private,
            missing=self._own.missing,
            incidents=self._own.incidents,
            # Also of a run that goes on without.
            report_client_metrics=report_client_metrics or self._own.asked_metrics or bool(self._own.client_metrics),
            own_evaluation=own_evaluation or self._own.own_evaluation,
            changing_names=self._own.changing_names,
            num_known=self._own.num_known,
        )

    # A round of a release

    def drawn(self, release: RoundRelease, known_clients: KnownClients, *purpose: object) -> dict[int, tuple[str, ...]]:
        """Draw the cohort of the next round of a release, and return it by nodes."""
        return known_clients.by_node(release.cohort(known_clients.names, self.generator(*purpose)))

    def ask(
        self,
        release: RoundRelease,
        server_round: int,
        *,
        length: int,
        model: wire.Model,
        asked: dict[int, tuple[str, ...]],
        known_clients: KnownClients,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        grid: Grid,
        **fields: Any,
    ) -> list[Message]:
        """Charge a release for its cohort, and return the messages that ask the cohort: none leaves before the charge.

        Args:
            release: what is asked.
            server_round: 1, 2, ...
            length: of a client's row.
            model: the model that is sent.
            asked: the cohort, by nodes.
            known_clients: who is there.
            arrays: the model as it is sent.
            config: sent with it.
            grid: through which the messages are sent.
            fields: further fields of the instruction.

        Raises:
            ValueError: if the method can't run with a model of this size; nothing is charged then.
            LedgerError: if the charge can't be written down; the run has not been charged then.
        """
        started = time.monotonic()
        cohort = tuple(name for names in asked.values() for name in names)
        ask = release.ask(length, cohort).in_run(self.log.run)
        charge = release.next_charge(cohort, server_round)
        with self.checkpoints.unfinished(charge):
            self.log.append(charge)
        release.take(charge)
        self.note(num_known=max(self._own.num_known, len(known_clients.names)))
        self.charged(release, server_round)
        if self._own.model is not None and np.array_equal(self._own.model, model.vector):
            model = replace(model, vector=self._own.model)  # one copy of what was released last
        now = Round(
            server_round=server_round,
            method=release.name,
            ask=ask,
            length=length,
            model=model,
            asked=asked,
            started=started,
            stock=not known_clients.hosting,
        )
        letter = Letter(record_names=known_clients.record_names, arrays=arrays, config=config, fields=fields)
        messages = list(self.exchange.messages(now, letter))  # Flower's own grid reads them twice
        now = replace(now, bytes_down=sum(wire.content_bytes(message.content) for message in messages))
        self.asked[release.name] = Asked(
            now=now,
            limits=release.limits(now),
            sent=tuple(message.metadata for message in messages),
            number=charge.number,
            letter=letter,
            grid=grid,
        )
        return messages

    def charged(self, release: RoundRelease, server_round: int) -> None:
        """Remember that a release was charged for a round: a run that goes on does not ask for it again."""
        self.note(last_charged={**self._own.last_charged, release.name: server_round}, not_private=self.not_private)

    def was_charged(self, release: RoundRelease, server_round: int) -> bool:
        """Return whether this round of a release, or a later one, was charged before."""
        return server_round <= self._own.last_charged.get(release.name, 0)

    def waits(self, release: RoundRelease, server_round: int) -> bool:
        """Return whether clients were asked in this round, and their replies were not added up yet."""
        asked = self.asked.get(release.name)
        return asked is not None and asked.now.server_round == server_round

    def total(self, release: RoundRelease, replies: Any) -> tuple[Round, Collected]:
        """Check the replies to what was asked and add them up, once.

        Raises:
            RuntimeError: if the state of the release has changed since it was asked: then it may lack the charge of this round.
        """
        asked = self.asked.pop(release.name)
        if release.num_charged != asked.number:
            raise RuntimeError(
                f"state: {release.name} has {release.num_charged} charges, and round {asked.now.server_round} was charge "
                f"{asked.number}: its state was changed while the round was open, and the round is not released"
            )
        more = replies.more if isinstance(replies, Replies) else Replies(asked.grid).more
        collected = self.exchange.total(asked, replies, more, seeded=self.seeded_noise)
        for seen, incident in ((collected.seeded_clients, _SEEDED), (collected.repeated, _OLDER)):
            # Told once, and not where it tells who was in a cohort.
            if seen and incident not in self._own.incidents and not self.secret_cohort:
                self.note(incidents=(*self._own.incidents, incident))
        return asked.now, collected

    def learn(self, now: Round, collected: Collected) -> np.ndarray:
        """Return the next global model [d], float32; the last one if the round is left out, although it was charged."""
        if not any(report.replies for report in self._own.rounds):
            diagnostics.log_constants(now, collected)
        kept = None if self._optimizer is None else self._optimizer.state
        try:
            vector = self.rules.learn(now, collected, self.generator("noise", now.server_round))
            collected.total = collected.total[:0].copy()  # nobody needs it any more
            if self._optimizer is not None:
                vector = self._optimizer.step(now.server_round, now.layout, now.vector, vector)
            if names := now.layout.overflows(vector):
                raise RoundLeftOut(f"array {names[0]!r} would leave the range of its dtype")
        except RoundLeftOut as why:
            if self._optimizer is not None and kept is not None:
                self._optimizer.state = kept  # else what is not finite would leave out all later rounds as well
            self.note(incidents=(*self._own.incidents, f"round {now.server_round} was left out: {why}"))
            log.warning("%s", self._own.incidents[-1])
            return now.vector
        return vector.astype(np.float32)

    def evaluated(self, server_round: int, replies: Any) -> dict[str, float] | None:
        """Record and return value and standard error of every metric of a private evaluation; None where there is none."""
        evaluation = self.rules.evaluation
        if evaluation is None or not self.waits(evaluation.release, server_round):
            return None
        now, collected = self.total(evaluation.release, replies)
        secret = evaluation.release.secret_cohort
        in_vain = 0 if collected.clients or secret else now.cohort_size
        try:
            noised = evaluation.result(now, collected, self.generator("evaluation", server_round))
        except RoundLeftOut as why:
            refusal = next(iter(collected.refused.values()), None)
            log.warning("the evaluation of round %s was left out: %s%s", server_round, why, f"; {refusal}" if refusal else "")
            incident = f"the evaluation of round {server_round} was charged, and released nothing: {why}"
            self.note(incidents=(*self._own.incidents, incident))
            noised = None
            # Whether a client has answered would tell who is in the cohort: where that is a secret, the noised number decides.
            in_vain = why.in_vain if secret else in_vain
        else:
            self.note(evaluations={**self._own.evaluations, server_round: noised})
        if in_vain:
            self.note(unanswered_evaluations=(*self._own.unanswered_evaluations, in_vain))
        elif now.cohort_size or secret:
            self.note(unanswered_evaluations=())
        if ended := diagnostics.why_no_evaluation(self._own, self.rules.num_clients):
            ended += ", as far as their noised results tell" if secret else ""
            log.warning("%s; training goes on", ended)
            self.note(incidents=(*self._own.incidents, ended))
        self.checkpoints.evaluated()
        return noised

    def report(self, now: Round, collected: Collected, vector: np.ndarray, *, epsilon: float) -> RoundReport:
        """Record a round and its model.

        Raises:
            RuntimeError: if no client has sent a usable update in enough rounds in a row; the run is then as after the last round
                with one, and what it was charged since stays charged.
        """
        release = self.rules.training
        report = RoundReport(
            server_round=now.server_round,
            cohort_size=now.cohort_size,
            replies=len(collected.clients),
            bytes_down=now.bytes_down,
            bytes_up=collected.num_bytes,
            bytes_per_client=release.bytes_per_client(now, collected),
            seconds=time.monotonic() - now.started,
            epsilon=epsilon,
            secret_cohort=release.secret_cohort,
            numbers=self.rules.numbers(now),
        )
        self.note(
            rounds=(*self._own.rounds, report),
            missing=self._own.missing + collected.missing,
            model=vector,
            refusal=next(iter(collected.refused.values()), self._own.refusal),
        )
        try:
            diagnostics.check_usable_updates(self._own, self.rules.num_clients)
        except RuntimeError:
            self.checkpoints.go_back(evaluates=not diagnostics.why_no_evaluation(self._own, self.rules.num_clients))
            raise
        return report

    def stop(self, server_round: int, reason: str) -> list[Message]:
        """Record, once, that this round and all later ones are not run; return no messages.

        Raises:
            ValueError: if no round was run before: the model would be the initial one.
        """
        self.asked.pop(self.rules.training.name, None)
        if not self._own.ended_before:
            incident = f"ended before round {server_round}: {reason}"
            self.note(ended_before=server_round, incidents=(*self._own.incidents, incident))
            log.info("%s", incident)
        if not self._own.rounds:
            raise ValueError(f"no round was run: {self._own.incidents[-1]}")
        return []
