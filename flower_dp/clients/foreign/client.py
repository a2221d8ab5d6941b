"""The one client of a node whose app is not ours: what it checks, charges and adds before and after the app is called."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final

from flower_dp import wire
from flower_dp.clients import answering
from flower_dp.clients.account import account_of, refuse_ledger
from flower_dp.clients.foreign.app import AppCall, AppContribution, AppMetrics, AppTraining, AppUpdates
from flower_dp.clients.local.agreement import agreed_terms, charged
from flower_dp.clients.local.row import evaluation_pipeline
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.reasons import Declined
from flower_dp.clients.reply.client_level import CLIENT_LEVEL
from flower_dp.clients.reply.pipeline import Job, Pipeline, Train
from flower_dp.clients.reply.work import NOT_HOSTED, Work
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.release import Release
from flower_dp.wire import Instruction, Refusal


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

    @property
    def has_own_terms(self) -> bool:
        """Whether each message is private on its own."""
        return self.terms is not None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of its terms, or those without any; and private evaluation, if there is a budget or needs none."""
        methods = CLIENT_LEVEL if self.terms is None else (self.terms.method,)
        return methods if self.terms is not None and self.evaluation is None else (*methods, wire.EVALUATION)

    def work(self, instruction: Instruction, app: AppCall, train: AppTraining | None) -> Work:
        """Return what this client does; its account is charged when this returns, and the app is not called yet.

        Args:
            instruction: one that was checked.
            app: the call of the app.
            train: the app's training; None for an evaluation.
        """
        refused = {name: NOT_HOSTED for name in instruction.clients if name != self.name}
        work = self._shared(instruction, app, train) if self.terms is None else self._own(instruction, app, train, self.terms)
        return replace(work, refused=refused | work.refused)

    def _shared(self, instruction: Instruction, app: AppCall, train: AppTraining | None) -> Work:
        """Return the work whose row is clipped, with its share of the noise."""
        refuse_ledger(app.context)
        rows: Train = AppMetrics(app=app, bounds=instruction.bounds) if train is None else AppUpdates(train=train)
        length = instruction.bounds.num_counted if train is None else train.model.layout.size
        jobs = [self._job(instruction)] if self.name in instruction.clients else []
        return answering.shared_work(instruction, train=rows, length=length, jobs=jobs, refused={})

    def _own(self, instruction: Instruction, app: AppCall, train: AppTraining | None, own_terms: OwnTerms) -> Work:
        """Return the work whose row is private on the client's own terms, which were charged for it."""
        length = train.model.layout.size if train is not None else len(instruction.bounds.bounds)
        terms_of = partial(self._evaluation_terms, own_terms) if train is None else own_terms.terms
        terms = agreed_terms(instruction, self.name, terms_of, self.policy)
        if isinstance(terms, Refusal):
            return Work(groups=[], length=length, refused={self.name: terms})
        if unpaid := charged(account_of(None, [self.name], app.context), {self.name: terms}, instruction):
            return Work(groups=[], length=length, refused=unpaid)
        if train is None:
            of = AppContribution(app=app, bounds=instruction.bounds)
            pipeline = evaluation_pipeline(terms.release, of=of, dimension=length)
        else:
            pipeline = own_terms.pipeline(terms.release, train=train, length=length)
        return Work(groups=[(pipeline, [self._job(instruction)])], length=length, refused={})

    def _evaluation_terms(self, own_terms: OwnTerms) -> Terms:
        if self.evaluation is None:
            raise Declined("evaluation=None: this client has no budget of private evaluations")
        terms = self.evaluation.terms(self.name, own_terms.terms())
        if terms.release.unit != "client":
            raise Declined("an app's metrics are means over records, and one record moves them by nobody knows how much")
        return terms

    def _job(self, instruction: Instruction) -> Job:
        own = instruction.ask.own.get(self.name)
        # A function, not a generator: every draw takes new entropy from the operating system.
        secret = partial(answering.generator, self, instruction, self.name)
        return Job(name=self.name, records=_Unseen(), seed=0, secret=secret, weight=1.0 if own is None else own.weight)


class _Unseen:
    """The records of a client whose app reads them itself."""

    def __len__(self) -> int:
        return 0

    def batch(self, positions: Any, device: Any) -> Any:
        """Raise: nothing here reads records."""
        raise TypeError("the records are the app's own")
