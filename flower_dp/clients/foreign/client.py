"""The one client of a node whose app is not ours: what it checks, charges and adds before and after the app is called."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, final

import numpy as np
from flwr.app import Context

from flower_dp import wire
from flower_dp.clients.account import account_of, refuse_ledger
from flower_dp.clients.client_level_registry import CLIENT_LEVEL
from flower_dp.clients.foreign.evaluation import AppMetrics, local_row_of_app
from flower_dp.clients.foreign.training import AppCall, AppTraining, Updates
from flower_dp.clients.local.agreement import own_ask, why_not
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.reasons import Declined, reading
from flower_dp.clients.reply import client_level
from flower_dp.clients.reply.pipeline import Job, Pipeline, Train, failure
from flower_dp.clients.reply.work import Work, add_up
from flower_dp.core import noise
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.core.noise import Generator
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.ledger_file import evaluation_account
from flower_dp.privacy.release import Release
from flower_dp.wire import Instruction

_NO_TERMS = "this client's terms can't be made"


class OwnTerms(Protocol):
    """One client's own terms under a method whose every message is private on its own, for example `NbAFLTerms`."""

    @property
    def method(self) -> str:
        """Name of the method."""

    def terms(self) -> Terms:
        """Return the client's terms, from its own budget and data size alone."""

    def pipeline(self, release: Release, *, train: Train, length: int) -> Pipeline:
        """Return how the client makes its reply; a row of `train` is the model [length] that its app has trained."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AppClient:
    """The one client of a node."""

    name: str
    terms: OwnTerms | None
    policy: ClientPolicy
    evaluation: EvaluationBudget | None
    noise_seed: int | None
    methods: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        methods = tuple(CLIENT_LEVEL) if self.terms is None else (self.terms.method,)
        evaluates = self.terms is None or self.evaluation is not None
        object.__setattr__(self, "methods", (*methods, wire.EVALUATION) if evaluates else methods)

    def check(self, instruction: Instruction) -> None:
        """Refuse an instruction of another method, or one against the policy."""
        if instruction.method not in self.methods or instruction.method == wire.EVALUATION:
            raise Declined(f"method={instruction.method!r}: this client runs {', '.join(self.methods)}")
        if self.terms is None:
            self.policy.check(instruction.ask)
        self.policy.check_clip(instruction.ask)
        if self.terms is not None and self.policy.min_noise_std:
            raise Declined(f"min_noise_std={self.policy.min_noise_std:g}: this client's noise follows from its own budget alone")

    def check_evaluates(self, instruction: Instruction) -> None:
        """Refuse an instruction that is of no private evaluation, or of one without a budget that would pay for it."""
        if instruction.method != wire.EVALUATION or wire.EVALUATION not in self.methods:
            need = "evaluation=EvaluationBudget(...) beside its terms" if self.terms is not None else wire.EVALUATION
            raise Declined(f"method={instruction.method!r}: to evaluate, this client needs {need}")

    def evaluate(self, instruction: Instruction, app: AppCall) -> tuple[np.ndarray, dict[str, str]]:
        """Return this client's row [dimension] of a private evaluation, or zeros and why not; the app is called last."""
        bounds, purpose = instruction.bounds, f"evaluation of {self.name}"
        if self.terms is not None:
            rng = noise.noise_generator(self.noise_seed, instruction.server_round, purpose)
            return self._local_evaluation(instruction, bounds, app, rng)
        refuse_ledger(app.context)
        self.policy.check_evaluation(instruction.ask)
        made = add_up(np.zeros(0), self._sum(instruction, AppMetrics(app=app, bounds=bounds), bounds.num_counted, purpose))
        return made.total, made.refused

    def _local_evaluation(
        self, instruction: Instruction, bounds: MetricBounds, app: AppCall, rng: Generator
    ) -> tuple[np.ndarray, dict[str, str]]:
        zeros = np.zeros(len(bounds.bounds))
        own = own_ask(instruction, self.name)
        if own is None or self.terms is None or self.evaluation is None:
            return zeros, {}
        try:
            terms = self.evaluation.terms(self.name, self.terms.terms())
            if terms.release.unit != "client":
                raise Declined("an app's metrics are means over records, and one record moves them by nobody knows how much")
            self.policy.check_own_evaluation(terms.release)
        except Exception as error:
            return zeros, {self.name: failure(self.name, error, _NO_TERMS).reason}
        if reason := why_not(terms, instruction.ask.promise, own):
            return zeros, {self.name: reason}
        account = account_of(None, [self.name], app.context)
        if unpaid := account.charge({evaluation_account(self.name): terms}):
            return zeros, {self.name: next(iter(unpaid.values()))}
        return own.weight * local_row_of_app(app, bounds=bounds, release=terms.release, rng=rng), {}

    def work(self, instruction: Instruction, train: AppTraining, context: Context) -> Work:
        """Return what this client does; its account is charged when this returns, and the app is not called yet."""
        refused = {name: "not hosted here" for name in instruction.clients if name != self.name}
        if self.terms is not None:
            return self._local_work(instruction, train, context, refused)
        refuse_ledger(context)
        work = self._sum(instruction, Updates(train=train), train.model.layout.size, self.name)
        return replace(work, refused=refused)

    def _sum(self, instruction: Instruction, train: Train, length: int, purpose: str) -> Work:
        """Return the work whose row is that of `train` [length], clipped, with its share of the noise."""
        with reading():
            pipeline = client_level.pipeline(instruction.ask, train=train, length=length)
        jobs = [self._job(instruction, 1.0, purpose)] if self.name in instruction.clients else []
        return Work(groups=[(pipeline, jobs)], length=length, refused={})

    def _local_work(self, instruction: Instruction, train: AppTraining, context: Context, refused: dict[str, str]) -> Work:
        length, own = train.model.layout.size, own_ask(instruction, self.name)
        if self.terms is None or own is None:
            return Work(groups=[], length=length, refused=refused)
        try:
            terms = self.terms.terms()
            self.policy.check_own(terms.release)
        except Exception as error:
            return Work(groups=[], length=length, refused=refused | {self.name: failure(self.name, error, _NO_TERMS).reason})
        if reason := why_not(terms, instruction.ask.promise, own):
            return Work(groups=[], length=length, refused=refused | {self.name: reason})
        account = account_of(None, [self.name], context)
        refused |= account.charge({self.name: terms})
        if self.name in refused:
            return Work(groups=[], length=length, refused=refused)
        pipeline = self.terms.pipeline(terms.release, train=train, length=length)
        return Work(groups=[(pipeline, [self._job(instruction, own.weight, self.name)])], length=length, refused=refused)

    def _job(self, instruction: Instruction, weight: float, purpose: str) -> Job:
        # A function, not a generator: every draw takes new entropy from the operating system.
        secret = partial(noise.noise_generator, self.noise_seed, instruction.server_round, purpose)
        return Job(name=self.name, records=_Unseen(), seed=0, secret=secret, weight=weight)


class _Unseen:
    """The records of a client whose app reads them itself."""

    def __len__(self) -> int:
        return 0

    def batch(self, positions: Any, device: Any) -> Any:
        """Raise: nothing here reads records."""
        raise TypeError("the records are the app's own")
