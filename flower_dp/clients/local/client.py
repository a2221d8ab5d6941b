"""The client of local DP methods: every message has its full noise, by the client's own budget and account."""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from flower_dp import wire
from flower_dp.clients import answering
from flower_dp.clients.account import LedgerPaths, account_of, charged, ledger_files, ledger_of, verify_terms
from flower_dp.clients.client_vectors import load_vector
from flower_dp.clients.local.evaluation import EvaluationRecipe, RecordMetrics, record_loss_and_accuracy
from flower_dp.clients.local.recipe import DryRunnable, LocalRecipe, ModelPreconditions, Stateful
from flower_dp.clients.node_client import HostingClient
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.refusal_messages import UNFIT, Declined
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline
from flower_dp.clients.training import dry_run
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.records import Records, repeats_rows
from flower_dp.clients.training.training_rng import batch_seed
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.wire import Instruction, Refusal, ReleaseRequest

__all__ = ["LocalDPClient", "LocalRecipe"]


class LocalDPClient(HostingClient):
    """A Flower client under local DP: every client's reply gets its full noise before the node adds the replies up.

    Each client's own terms fix its noise. A client compares the server's version of its terms with its own. If they differ, or
    its own noise is less, it does not reply: the server would state too small an epsilon. Each reply is charged to the client's
    account before its records are read. A client whose budget is spent does not reply, whatever round number the server sends.

    The account is in the node's Flower state, which is empty in the next run and after a restart of the SuperNode. Or it is in a
    file on the device, which counts the replies of all runs: the `ledger-path` of the node's config, or `ledger`.

    A client without the node's context does not reply: it can't know the settings of the device's owner, nor past charges. A
    context belongs to one message. A client object that is kept needs the next message's context (`client_app` attaches it).
    Without it the client does not reply either, since the charge would be lost with the old context.

    The node replies with the sum of its clients' rows, with the server's weights: weighting a noised row costs nothing.

    Args:
        model: architecture without BatchNorm; its weights are overwritten.
        clients: records of every hosted client, by its stable name; a device hosts one.
        recipe: recipe of a reply, for example `FedSGDDPCRecipe`.
        context: context of the node, as `client_fn` receives it; `client_app` attaches it itself. Its config may name a
            `ledger-path`.
        ledger: the app's own file of the clients' accounts, or one each by the client's name. None, and no `ledger-path`: the
            accounts last one run, in the node's state.
        policy: further limits of this client.
        device: device to train on; by default the GPU if this process has one, else the CPU.
        seed: seed of the order of records, never of noise or of the choice of records.
        noise_seed: seed of fixed noise, for tests only; the server learns of it, so that the run counts as not private.
        evaluation: budget of each client's private evaluations, beside the recipe's budget; None: it takes part in none.
        record_metrics: metrics of single records, for private evaluation; by default `loss` and `accuracy`.

    Example:
        >>> import torch
        >>> from flwr.app import Context, RecordDict
        >>> from flower_dp.clients import FedSGDDPCRecipe, LocalDPClient, TensorRecords
        >>> records = TensorRecords(inputs=torch.randn(20, 3), targets=torch.randint(0, 2, (20,)))
        >>> recipe = FedSGDDPCRecipe(mechanism="laplace", clip_norm=1.0, epsilon=1.0, num_replies=5)
        >>> context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        >>> client = LocalDPClient(
        ...     model=torch.nn.Linear(3, 2), clients={"hospital-7": records}, recipe=recipe, context=context
        ... )
        >>> client.methods
        ('fedsgd-dpc',)
    """

    has_own_terms = True

    def __init__(
        self,
        *,
        model: nn.Module | FlatModel,
        clients: Mapping[str, Records],
        recipe: LocalRecipe,
        context: Context | None = None,
        ledger: LedgerPaths | None = None,
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        evaluation: EvaluationBudget | None = None,
        record_metrics: RecordMetrics | None = None,
    ) -> None:
        super().__init__(model=model, clients=clients, policy=policy, device=device, seed=seed, noise_seed=noise_seed)
        self.recipe = recipe
        self.ledger = ledger
        self.evaluation_budget = evaluation
        self.record_metrics = record_metrics
        self._replied = False  # with this context
        if ledger is not None:
            ledger_files(ledger, clients)
        if context is not None:
            self.attach(context)

    def attach(self, context: Context) -> None:
        """Receive the context of the node, whose config may name a ledger of the device's owner.

        Raises:
            Declined: if the owner's ledger is not the app's, or not a path.
        """
        ledger_of(self.ledger, self.clients, context)
        self.context, self._replied = context, False

    @property
    def methods(self) -> tuple[str, ...]:
        """The method of the recipe, and private evaluation for a client with a budget of it."""
        evaluates = self.evaluation_budget is not None and self.policy.allow_evaluation
        return (self.recipe.method, wire.EVALUATION) if evaluates else (self.recipe.method,)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that the recipe works with besides the model."""
        return self.recipe.vectors if isinstance(self.recipe, Stateful) else ()

    def unable_reason(self) -> str | None:
        """Return why none of the hosted clients can train, in fixed words; None if one can, or if only a record could tell."""
        reason = super().unable_reason()
        if reason is None:
            dry_run.log_private_kind(self.clients)
        return reason

    def _unfit_reason(self, records: Records) -> str | None:
        reason = self.recipe.unfit_reason(self.model, records) if isinstance(self.recipe, DryRunnable) else None
        return None if reason is None else f"{UNFIT}: {reason}"

    def _work(self, vector: Tensor, instruction: Instruction) -> answering.NodeWork:
        """Return the work whose rows get their full noise; each is charged to its client's account when this returns."""
        ask, number, recipe = instruction.ask, instruction.server_round, self._recipe(instruction.ask)
        account = account_of(self.ledger, self.clients, self.context)
        if self._replied:
            raise Declined("context: is of an earlier message; make the client in client_fn, or use flower_dp.clients.client_app")
        self._replied = True
        # The order protects clients: agree on terms, dry run, preconditions, charge, and only then read records (`groups` is
        # lazy). A client that can't train must not pay. Nothing that follows from a record's value may precede the charge: a
        # refusal would reveal it, without noise and without a charge.
        agreed, refused = self._agreed(instruction, recipe)
        recipes, kept = dict.fromkeys(agreed, recipe), {}
        if isinstance(recipe, Stateful) and self.context is not None:  # `account_of` has refused a client without one
            vectors = {name: torch.from_numpy(array.copy()).to(vector.device) for name, array in ask.vectors.items()}
            stored = {name: load_vector(self.context.state, name, vector.numel()) for name in agreed}
            kept = {name: torch.from_numpy(array).to(vector.device) for name, array in stored.items() if array is not None}
            recipes = {name: recipe.with_vectors(vectors, kept.get(name)) for name in agreed}
        if ask.metrics is None:
            unfit = {name: self._dry_run(name, records) for name, (_, records) in agreed.items()}
            refused |= {name: Refusal(reason=reason) for name, reason in unfit.items() if reason is not None}
        for name, own in recipes.items():
            if isinstance(own, ModelPreconditions) and (
                text := own.refusal_reason(vector, model=self.model, server_round=number)
            ):
                refused[name] = Refusal(reason=text)
        due = {name: terms for name, (terms, _) in agreed.items() if name not in refused}
        refused |= charged(account, due, instruction)

        def groups() -> Iterator[tuple[Pipeline, list[ClientJob]]]:
            for name, (terms, records) in agreed.items():
                if name in refused:
                    continue
                job = ClientJob(
                    name=name,
                    records=records,
                    seed=batch_seed(self.seed, number, name),
                    secret=cache(partial(answering.generator, self, instruction, name)),
                    weight=ask.own[name].weight,
                    kept=kept.get(name),
                )
                yield recipes[name].pipeline(terms.release, model=self.model, server_round=number), [job]

        length = vector.numel() if ask.metrics is None else len(ask.metrics.bounds)
        return answering.NodeWork(groups=groups(), length=length, refused=dict(refused))

    def _recipe(self, ask: ReleaseRequest) -> LocalRecipe:
        """Return the recipe of replies to a request.

        Raises:
            Declined: if the request names a metric that this client does not have.
        """
        if ask.metrics is None:
            return self.recipe
        recipe: Any = self.recipe
        metrics = self.record_metrics or record_loss_and_accuracy(
            recipe.loss if hasattr(recipe, "loss") else recipe.training.loss
        )
        if unknown := sorted(set(ask.metrics.bounds) - set(metrics.names)):
            raise Declined(f"metric {unknown[0]!r}: this client has {', '.join(metrics.names)}")
        return EvaluationRecipe(training=recipe, budget=self.evaluation_budget, metrics=metrics, bounds=ask.metrics)

    def _agreed(
        self, instruction: Instruction, recipe: LocalRecipe
    ) -> tuple[dict[str, tuple[ClientTerms, Records]], dict[str, Refusal]]:
        """Return terms and records of the clients whose own terms equal the server's, and the refusals of the others."""
        agreed: dict[str, tuple[ClientTerms, Records]] = {}
        hosted, refused = self._hosted(instruction.clients)
        for name, records in hosted.items():
            terms = verify_terms(instruction, name, partial(recipe.terms, name, records), self.policy)
            if isinstance(terms, Refusal):
                refused[name] = terms
            elif terms.release.unit == "record" and repeats_rows(records):
                reason = "one row stands for several of its records, so one record would count more than once"
                refused[name] = Refusal(reason=reason)
            else:
                agreed[name] = (terms, records)
        return agreed, refused
