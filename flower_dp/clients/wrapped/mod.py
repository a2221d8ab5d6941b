"""A Flower mod that puts this package's protection around any ClientApp: sklearn, JAX, TensorFlow, plain NumPy."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_dp import wire
from flower_dp.clients import answering, participation
from flower_dp.clients.account import account_of, charged, keeping_account, verify_terms
from flower_dp.clients.answering import NOT_HOSTED, NodeWork
from flower_dp.clients.local.row import evaluation_pipeline
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.refusal_messages import SEE_LOG, Declined, contained, decline_invalid, replied
from flower_dp.clients.reply.client_level import CLIENT_LEVEL
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Train
from flower_dp.clients.wrapped import calls
from flower_dp.core import checks
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.release import Release
from flower_dp.wire import HostedClients, Instruction, Model, RecordNames, Refusal

log = logging.getLogger("flwr")

# The records of a client whose app reads them itself.
_UNSEEN: Any = ()


class OwnTerms(Protocol):
    """One client's own terms under a local DP method, for example `NbAFLTerms`."""

    @property
    def method(self) -> str:
        """Name of the method."""

    def terms(self) -> ClientTerms:
        """Return the client's terms, from its own budget and data size alone."""

    def pipeline(self, release: Release, *, train: Train, length: int) -> Pipeline:
        """Return the pipeline of the client's reply; a row of `train` is the model [length] that its app has trained."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AppClient:
    """The one client of a node."""

    name: str
    terms: OwnTerms | None
    policy: ClientPolicy
    evaluation: EvaluationBudget | None
    noise_seed: int | None

    @property
    def has_own_terms(self) -> bool:
        """Whether the client adds its full noise by its own terms (local DP)."""
        return self.terms is not None

    @property
    def methods(self) -> tuple[str, ...]:
        """The method of its terms, or the client-level methods; and private evaluation, unless it has terms and no budget."""
        methods = CLIENT_LEVEL if self.terms is None else (self.terms.method,)
        return methods if self.terms is not None and self.evaluation is None else (*methods, wire.EVALUATION)

    def work(self, instruction: Instruction, app: calls.AppCall, train: calls.AppTraining | None) -> NodeWork:
        """Return this client's work; its account is charged when this returns, and the app is not called yet.

        Args:
            instruction: instruction that was checked.
            app: call of the app.
            train: training of the app; None for an evaluation.
        """
        refused = {name: NOT_HOSTED for name in instruction.clients if name != self.name}
        work = self._shared(instruction, app, train) if self.terms is None else self._own(instruction, app, train, self.terms)
        return replace(work, refused=refused | work.refused)

    def _shared(self, instruction: Instruction, app: calls.AppCall, train: calls.AppTraining | None) -> NodeWork:
        """Return the work whose row is clipped, with its share of the noise, if any."""
        own = [self.name] if self.name in instruction.clients else []
        refused = participation.refusals(instruction, own, app.context)
        rows: Train = calls.AppMetrics(app=app, bounds=instruction.bounds) if train is None else calls.AppUpdates(train=train)
        length = instruction.bounds.num_counted if train is None else train.model.layout.size
        jobs = [self._job(instruction) for name in own if name not in refused]
        return answering.shared_work(instruction, train=rows, length=length, jobs=jobs, refused=refused)

    def _own(
        self, instruction: Instruction, app: calls.AppCall, train: calls.AppTraining | None, own_terms: OwnTerms
    ) -> NodeWork:
        """Return the work whose row gets the full noise of the client's own terms; the reply is charged here, before any work."""
        length = train.model.layout.size if train is not None else len(instruction.bounds.bounds)
        terms_of = partial(self._evaluation_terms, own_terms) if train is None else own_terms.terms
        terms = verify_terms(instruction, self.name, terms_of, self.policy)
        if isinstance(terms, Refusal):
            return NodeWork(groups=[], length=length, refused={self.name: terms})
        if unpaid := charged(account_of(None, [self.name], app.context), {self.name: terms}, instruction):
            return NodeWork(groups=[], length=length, refused=unpaid)
        if train is None:
            of = calls.AppContribution(app=app, bounds=instruction.bounds)
            pipeline = evaluation_pipeline(terms.release, of=of, dimension=length)
        else:
            pipeline = own_terms.pipeline(terms.release, train=train, length=length)
        return NodeWork(groups=[(pipeline, [self._job(instruction)])], length=length, refused={})

    def _evaluation_terms(self, own_terms: OwnTerms) -> ClientTerms:
        if self.evaluation is None:
            raise Declined("evaluation=None: this client has no budget of private evaluations")
        terms = self.evaluation.terms(self.name, own_terms.terms())
        if terms.release.unit != "client":
            raise Declined("evaluation: an app's metrics are means over records, and the effect of one record is not bounded")
        return terms

    def _job(self, instruction: Instruction) -> ClientJob:
        own = instruction.ask.own.get(self.name)
        # A function, not a generator: every generator takes new entropy from the operating system, and no copy repeats noise.
        secret = partial(answering.generator, self, instruction, self.name)
        return ClientJob(name=self.name, records=_UNSEEN, seed=0, secret=secret, weight=1.0 if own is None else own.weight)


def privacy_mod(
    *,
    name: str | Callable[[Context], str] | None = None,
    policy: ClientPolicy | None = None,
    terms: OwnTerms | Callable[[Context], OwnTerms] | None = None,
    evaluation: EvaluationBudget | None = None,
    noise_seed: int | None = None,
) -> Mod:
    """Return a Flower mod for an app whose clients are not this package's: `ClientApp(mods=[privacy_mod()])`.

    The app gets the model and the config that a stock server would send, and trains as it likes. Of its reply the mod uses only
    the model. It makes the update, clips it, and rounds it to the lattice of the noise. It then adds the client's noise share, if
    the server requests shares, and compresses after that. The reply is one that `DPClient` would send. With `terms` the client
    instead adds its full noise by its own terms (local DP), as a `LocalDPClient` does. Each reply is then charged to an account
    in the node's state, or in the owner's `ledger-path`, before the app is called.

    A reply to training has no example counts, and the app's metrics only if both server and policy allow it. In a private
    evaluation (`flower_dp.strategies.PrivateEvaluation`) the mod calls the app's own evaluate function. It sends only a vector of
    the metrics that the server names, clipped to their public bounds, with the client's noise share or, with `terms`, its full
    noise. It refuses all other messages (a stock server's `evaluate`, `query` and the like) unless the policy allows metrics:
    nothing in their replies is private. Put the mod first in the list, so that no other mod changes a noised reply.

    Args:
        name: this client's stable name, public and unique among all clients, or a function of the node's context. None:
            `client-<partition-id>` of the node's config, else `node-<node id>`. The latter changes when the node restarts: no
            ledger of several runs takes such a client with terms of its own, and the statement says that names change.
        policy: this client's own limits.
        terms: this client's own terms, or a function of the node's context that makes them. None: methods in which no single
            message is private, with the noise that the server requests and the policy allows.
        evaluation: budget of this client's private evaluations, with `terms`; None: it takes part in none.
        noise_seed: seed of fixed noise, for tests only; the server learns of it, so that the run counts as not private.

    Raises:
        ValueError: for a value out of its range, naming the field.

    Example:
        >>> from flwr.clientapp import ClientApp
        >>> from flower_dp.clients import ClientPolicy, privacy_mod
        >>> policy = ClientPolicy(max_clip_norm=1.0, min_noise_multiplier=0.8)
        >>> app = ClientApp(mods=[privacy_mod(name="hospital-7", policy=policy)])
    """
    if name is not None and not callable(name):
        checks.line("name", name)
    if noise_seed is not None:
        checks.integer("noise_seed", noise_seed, at_least=0)
    if terms is not None and not hasattr(terms, "terms") and not callable(terms):
        raise ValueError(f"terms={terms!r}: must be a client's terms, for example NbAFLTerms, or a function that makes them")
    if policy is not None and not isinstance(policy, ClientPolicy):
        raise ValueError(f"policy={policy!r}: must be a ClientPolicy")
    if evaluation is not None and (terms is None or not isinstance(evaluation, EvaluationBudget)):
        raise ValueError(f"evaluation={evaluation!r}: must be an EvaluationBudget with terms; without terms the policy decides")
    return _PrivacyMod(name=name, policy=policy or ClientPolicy(), own_terms=terms, evaluation=evaluation, noise_seed=noise_seed)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _PrivacyMod:
    """The mod of `privacy_mod`; it holds no generator and no state that a copy could repeat."""

    name: str | Callable[[Context], str] | None
    policy: ClientPolicy
    own_terms: OwnTerms | Callable[[Context], OwnTerms] | None
    evaluation: EvaluationBudget | None
    noise_seed: int | None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Reply to the client query, or train or evaluate as the server instructs; refuse all other messages.

        For any message, the app can't change the client's account, and no error leaves. If the policy does not allow the message,
        or anything fails, the reply is a refusal.
        """
        return replied(message, "this client's app", lambda: self._reply(message, context, keeping_account(call_next)))

    def _reply(self, message: Message, context: Context, app: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        train = kind.partition(".")[0] == "train"
        # Not a query: the server would take the app for one of the Message API, but it may be a `NumPyClient`.
        if kind == "get_properties" or (train and wire.is_client_query(message)):
            return _config_reply(message, self._hosted(context))
        if train:
            return self._answered(message, context, app, None)
        if kind.partition(".")[0] == "evaluate" and (record_names := calls.names_to_evaluate(message.content)):
            return self._answered(message, context, app, record_names)
        if not self.policy.allow_metrics:
            raise Declined(f"message type {kind!r}: its reply would not be private, and the policy has allow_metrics=False")
        return app(message, context)

    def _hosted(self, context: Context) -> str:
        try:
            client = self._client(context)
        except Declined as error:
            return HostedClients(names=(), methods=frozenset(), error=error.reason).to_json()
        return HostedClients(names=(client.name,), methods=frozenset(client.methods)).to_json()

    def _client(self, context: Context) -> AppClient:
        """Return this node's client; hide the text and the class of an error, because they may contain data."""
        try:
            with contained():
                name = checks.line("name", self.name(context) if callable(self.name) else self.name or _default_name(context))
                terms = self.own_terms(context) if callable(self.own_terms) else self.own_terms
            return AppClient(name=name, terms=terms, policy=self.policy, evaluation=self.evaluation, noise_seed=self.noise_seed)
        except Exception as error:
            log.error("This client's name or terms can't be made", exc_info=error)
            raise Declined(f"this client's name or terms can't be made; {SEE_LOG}") from None

    def _answered(
        self, message: Message, context: Context, call_next: ClientAppCallable, to_evaluate: RecordNames | None
    ) -> Message:
        """Return the reply to an instruction to train, or to evaluate; an evaluation's payload is inside the reply header."""
        client, evaluates = self._client(context), to_evaluate is not None
        with decline_invalid():
            record_names = to_evaluate or calls.record_names_of(message.content)
            instruction = wire.instruction_of(message.content.config_records[record_names.config])
        answering.check(client, instruction, evaluates=evaluates)
        status = calls.EVALUATE_STATUS if evaluates else calls.TRAIN_STATUS
        app = calls.AppCall(call=call_next, message=message, context=context, record_names=record_names, status=status)
        train = None
        if not evaluates:
            with decline_invalid():
                train = calls.AppTraining(app=app, model=_model(wire.arrays_of(message.content), instruction))
        vector = np.zeros(0) if train is None else train.model.vector
        work = client.work(instruction, app, train)
        made, text = answering.answered(client, instruction, vector, work, lambda _: {} if train is None else train.metrics)
        return _config_reply(message, text, None if train is None else ArrayRecord(list(made.payload.arrays)))


def _model(record: ArrayRecord, instruction: Instruction) -> Model:
    """Return the server's model, with the arrays that the instruction marks as frozen."""
    names = tuple(record)
    if any(position >= len(names) for position in instruction.frozen):
        raise ValueError(f"frozen={list(instruction.frozen)[:8]}: must be below the model's number of arrays, {len(names)}")
    return Model.of(record, frozen=[names[position] for position in instruction.frozen])


def _default_name(context: Context) -> str:
    """Return `client-<partition-id>`, which is stable, if the node has one, else `node-<node id>`."""
    config = context.node_config
    part, parts = config.get("partition-id"), config.get("num-partitions")
    if not isinstance(part, int):
        return f"node-{context.node_id}"
    width = len(str(parts - 1)) if isinstance(parts, int) else 1
    return f"client-{part:0{width}}"


def _config_reply(message: Message, text: str, arrays: ArrayRecord | None = None) -> Message:
    content = RecordDict({wire.KEY: ConfigRecord({wire.KEY: text})})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content, reply_to=message)
