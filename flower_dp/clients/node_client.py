"""Base class of clients: read the instruction, do the dry run, reply."""

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from torch import Tensor, nn

from flower_dp import wire
from flower_dp.clients import answering
from flower_dp.clients.account import refuse_ledger
from flower_dp.clients.answering import NOT_HOSTED, NodeSum, NodeWork
from flower_dp.clients.client_vectors import store_vectors
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.refusal_messages import DATA, SEE_LOG, Declined, contained, decline_invalid, made_or_refused, redact_errors
from flower_dp.clients.reply.pipeline import failure
from flower_dp.clients.training.devices import default_device, exact_device, reproducible
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.records import Records
from flower_dp.core import checks
from flower_dp.wire import Instruction

log = logging.getLogger("flwr")

# Clients of a node that make a dry run, if none of them can train.
_MAX_TRIED = 16


class HostingClient(NumPyClient):
    """The common base of this package's clients: hosted clients, model, instruction and reply.

    It replies with one payload, the sum of its clients' rows. It sends no record, no example count and, unless its policy allows
    it, no metric. Subclasses list in `methods` the methods that they run, and return their pipelines from `_work`.

    Args:
        model: architecture without BatchNorm; its weights are overwritten. Nodes of one process may share a `FlatModel`, and with
            it everything found out about it and traced for it.
        clients: records of every hosted client, by its stable name; a device hosts one.
        policy: this client's own limits.
        device: device to train on; by default the GPU if this process has one, else the CPU.
        seed: seed of the order of records, never of the noise.
        noise_seed: seed of fixed noise, for tests only; the server learns of it, so that the run counts as not private.
        context: context of the node, as `client_fn` receives it; `client_app` attaches it itself.

    Attributes:
        dry_run_seconds: seconds that the dry runs of this client have taken so far.
        has_own_terms: whether each message has its full noise, by the clients' own terms (local DP).
    """

    has_own_terms: bool = False

    def __init__(
        self,
        *,
        model: nn.Module | FlatModel,
        clients: Mapping[str, Records],
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        context: Context | None = None,
    ) -> None:
        if not clients:
            raise ValueError("clients: a node must host at least one client")
        for name in clients:
            checks.line("clients: name", name)
        self.model = model if isinstance(model, FlatModel) else FlatModel(model, default_device(device))
        self.clients = clients
        self.policy = ClientPolicy() if policy is None else policy
        self.seed = seed
        self.context: Context | None = None
        self.noise_seed = noise_seed
        self.dry_run_seconds = 0.0
        if context is not None:
            self.attach(context)

    @property
    @abstractmethod
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that this client runs; it refuses the instructions of all others."""

    def attach(self, context: Context) -> None:
        """Receive the context of the node, with its state and the settings of the device's owner; called before `fit`.

        Raises:
            Declined: if its config names a ledger and this client keeps no account: its replies would not be counted there.
        """
        refuse_ledger(context)
        self.context = context

    def to_client(self) -> Client:
        """Return the client as Flower calls it. A refusal is a reply with a code, because Flower sends the text of an error."""
        return _Replying(self).to_client()

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to the client query: see `describe_hosted`."""
        with redact_errors("naming the clients"):
            return {wire.KEY: self.describe_hosted(self.unable_reason())}

    def describe_hosted(self, unable_reason: str | None) -> str:
        """Return as text the names of the hosted clients, their methods, and the reason if none of them can train."""
        names = tuple(sorted(self.clients))
        return wire.HostedClients(names=names, methods=frozenset(self.methods), unable=unable_reason or "").to_json()

    def unable_reason(self) -> str | None:
        """Return why none of the hosted clients can train, in fixed words; None if one can, or in doubt.

        Clients are tried one after another until one can train, and no more than a few.
        """
        reasons = []
        for name in islice(self.clients, _MAX_TRIED):
            try:
                with contained():
                    records = self.clients[name]
            except Exception as error:
                reasons.append(failure(name, error, DATA).reason)
                continue
            if (unfit := self._dry_run(name, records)) is None:
                return None
            if unfit not in reasons:
                log.error("Client %s: dry run: %s", name, unfit)
            reasons.append(unfit)
        return reasons[0] if reasons else None

    def _dry_run(self, name: str, records: Records) -> str | None:
        """Return why a client can't train, in fixed words; None if it can, or in doubt."""
        started = time.monotonic()
        try:
            with contained(), reproducible(self.model.device):
                return self._unfit_reason(records)
        except Exception as error:
            log.warning("Client %s: no dry run: %s: %s", name, type(error).__name__, error)
            return None
        finally:
            self.dry_run_seconds += time.monotonic() - started

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Return the payload arrays, 1 instead of an example count, and the reply header that describes the payload.

        Args:
            parameters: arrays of the server's model, frozen ones included, in the order of this client's own, and behind them the
                vectors of the request.
            config: config with the instruction.

        Raises:
            Declined: if the server's instruction is missing, malformed or against this client's policy, or the model does not
                fit.
            Failed: if anything else fails; only that leaves the device.
        """
        arrays, answer = self.answer(_in_order(parameters), config)
        return arrays, 1, answer

    def answer(self, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return the payload arrays, and the reply header that describes them.

        Args:
            arrays: arrays of the message, by name or by position, in order: the server's model, frozen arrays included, and
                behind it the vectors of the request.
            config: config with the instruction.

        Raises:
            Declined, Failed: as `fit`.
        """
        return self._answer("training", arrays, config)

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Return 0 instead of a loss, 1 instead of an example count, and the reply to a private evaluation.

        Raises:
            Declined, Failed: as `fit`.
        """
        return 0.0, 1, self.evaluation(_in_order(parameters), config)

    def evaluation(self, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a private evaluation, which has its payload inside.

        Args:
            arrays: arrays of the message, as for `answer`.
            config: config with the instruction.

        Raises:
            Declined, Failed: as `fit`.
        """
        return self._answer("evaluation", arrays, config)[1]

    def _answer(
        self, what: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        with redact_errors(what), reproducible(self.model.device):
            with decline_invalid():
                instruction = wire.instruction_of(config, list(arrays.values()))
            answering.check(self, instruction, evaluates=what == "evaluation")
            self._check_base(config.get(wire.BASE))
            vector = self._vector(arrays, instruction)
            with decline_invalid():
                instruction.ask.check_vectors(self.vectors if instruction.ask.metrics is None else (), vector.numel())
            made, text = answering.answered(self, instruction, vector, self._work(vector, instruction), _metrics)
            # Last: accounts were charged, and no later step could fail and leave a vector without its reply.
            if self.context is not None:
                store_vectors(self.context.state, {name: row.to("cpu", torch.float32).numpy() for name, row in made.kept.items()})
            return list(made.payload.arrays), {wire.KEY: text}

    def _hosted(self, names: Iterable[str]) -> tuple[dict[str, Records], dict[str, wire.Refusal]]:
        """Return the records of the hosted clients by name, and the refusals of the others."""
        hosted: dict[str, Records] = {}
        refused: dict[str, wire.Refusal] = {}
        for name in names:
            try:
                with contained():
                    records = self.clients[name]
                    len(records)
                hosted[name] = records
            except Exception as error:
                refused[name] = failure(name, error) if name in self.clients else NOT_HOSTED
        return hosted, refused

    def _check_base(self, servers: object) -> None:
        """Refuse to work on another frozen base than the server's: the update would be one of another model.

        Raises:
            Declined: with the server's hash; the hash of this client's own base is in the node's log alone.
        """
        if servers is not None and servers != self.model.base:
            log.error("The frozen base of this client's model has SHA-256 %s", self.model.base or "none: it has no frozen base")
            raise Declined(f"base={str(servers)[:16]}: this client's model has another frozen base; load the server's; {SEE_LOG}")

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that this client's training works with besides the model; it refuses all others."""
        return ()

    def _vector(self, arrays: Mapping[str, np.ndarray], instruction: Instruction) -> Tensor:
        """Return the trained part of the server's model as a vector [d].

        Raises:
            Declined: if the arrays do not fit this client's model.
        """
        layout, names = self.model.layout, list(arrays)[: len(arrays) - len(instruction.ask.vectors)]
        trained = {name: arrays[name] for position, name in enumerate(names) if position not in instruction.frozen}
        if len(trained) != len(layout.names):
            raise Declined(f"the server's model has {len(trained)} arrays, this client's {len(layout.names)}")
        if set(trained) != set(layout.names) and all(name.isdigit() for name in trained):
            trained = dict(zip(layout.names, trained.values(), strict=True))
        if set(trained) != set(layout.names):
            raise Declined(f"the server's model has arrays {sorted(trained)}, this client's {sorted(layout.names)}")
        with decline_invalid(), np.errstate(over="ignore"):
            vector = layout.flatten(trained)
        if not np.isfinite(vector).all():  # every record would count as zero, and be paid for
            raise Declined("the server's model has NaN or infinite entries")
        return torch.from_numpy(vector).to(exact_device(self.model.device))

    @abstractmethod
    def _unfit_reason(self, records: Records) -> str | None:
        """Return why no client can train on records of this kind, in fixed words; None if a client can, or in doubt."""

    @abstractmethod
    def _work(self, vector: Tensor, instruction: Instruction) -> NodeWork:
        """Return the work of this node's clients; charge accounts before any record is read."""


class _Replying(NumPyClient):
    """A client that refuses by a reply, not by an error."""

    def __init__(self, client: HostingClient) -> None:
        self._client = client

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return as `HostingClient.get_properties`, or a refusal."""
        made = made_or_refused("naming the clients", lambda: self._client.get_properties(config))
        return _refused(made) if isinstance(made, wire.Refusal) else made

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Return as `HostingClient.fit`, or a refusal."""
        made = made_or_refused("training", lambda: self._client.fit(parameters, config))
        return ([], 1, _refused(made)) if isinstance(made, wire.Refusal) else made

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Return as `HostingClient.evaluate`, or a refusal."""
        made = made_or_refused("evaluation", lambda: self._client.evaluate(parameters, config))
        return (0.0, 1, _refused(made)) if isinstance(made, wire.Refusal) else made


def _refused(refusal: wire.Refusal) -> dict[str, Any]:
    return {wire.REFUSED: refusal.to_json()}


def _in_order(parameters: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays without names by their positions."""
    return {str(position): array for position, array in enumerate(parameters)}


def _metrics(made: NodeSum) -> dict[str, float]:
    """Return the sums of training losses and, if measured, of the norms of updates before the clip and of their squares.

    The number of clipped updates is not sent: a share of clipped clients would reveal their number.
    """
    on = made.losses[0].device
    losses = torch.stack([loss.to(on) for loss in made.losses]).to("cpu", torch.float32)
    loss = {"loss": float(losses.nan_to_num().sum(dtype=torch.float64))}
    if not made.norms:
        return loss
    rows = torch.stack(made.norms)
    return loss | {"update-norm": float(rows.sum()), "update-norm-squared": float((rows * rows).sum())}
