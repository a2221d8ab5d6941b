"""The client: trains, clips, adds its noise, compresses; one client on a device, many on a simulation worker."""

import json
import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.client import NumPyClient
from torch import Tensor, nn

from flower_dp.core import checks, compression, noise
from flower_dp import wire
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.records import Records
from flower_dp.clients.training import FlatModel, LocalTraining
from flower_dp.clients.draws import batch_seed
from flower_dp.clients.engines import ENGINES, local_updates
from flower_dp.core.clipping import clip_l2
from flower_dp.core.noise import Generator
from flower_dp.wire import Answer, ClientLevelOrder, Instruction

log = logging.getLogger("flwr")


class NodeClient(NumPyClient):
    """What all clients of this package share: whom they host, the model, the way in and the way out.

    It answers with one payload, the sum of its clients' rows. It sends no record, no example count and, unless its policy allows
    it, no metric. Subclasses say in `methods` what they run, and in `_sum` what a row is and what protects it.

    Args:
        model: the architecture; its weights are overwritten. Without BatchNorm.
        clients: the records of every client that lives here, by its stable name; on a device one.
        policy: this client's own limits.
        device: where to train; by default the GPU if this process has one, else the CPU.
        seed: governs the order of records, never the noise.
        noise_seed: for tests only: fixed noise, of which the server is told, so that the run counts as not private.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        clients: Mapping[str, Records],
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
    ) -> None:
        if not clients:
            raise ValueError("clients: a node must host at least one client")
        chosen = torch.device(device) if device else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = FlatModel(model, chosen)
        self.clients = clients
        self.policy = policy or ClientPolicy()
        self.seed = seed
        self.state: RecordDict | None = None
        self.noise_seed = noise_seed

    @property
    @abstractmethod
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that this client runs; it refuses the instructions of all others."""

    def generator(self, instruction: Instruction, name: str, *, on: Tensor | None = None) -> Generator:
        """Return a fresh generator for the noise of one client's reply.

        Every call takes new entropy from the operating system: the client holds no state that a copy of it, or another process,
        could repeat. With a `noise_seed`, for tests, it follows from seed, round and client.
        """
        return noise.noise_generator(self.noise_seed, instruction.server_round, name, on=on)

    def attach(self, state: RecordDict) -> None:
        """Take the node's Flower state, for clients that keep an account there; called before `fit`."""
        self.state = state

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say which clients live here, and which methods they run."""
        return {wire.KEY: json.dumps({"clients": sorted(self.clients), "methods": list(self.methods)})}

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Return the payload arrays, 1 in the place of an example count, and the answer that describes the payload.

        Raises:
            ValueError: if the server's instruction is missing, malformed or against this client's policy, or the model does
                not fit.
        """
        instruction = wire.instruction_of(config)
        if instruction.method not in self.methods:
            raise ValueError(f"method={instruction.method!r}: this client runs {', '.join(self.methods)}")
        self.policy.check(instruction)
        layout = self.model.layout
        if len(parameters) != len(layout.names):
            raise ValueError(f"the server's model has {len(parameters)} arrays, this client's {len(layout.names)}")
        vector = torch.from_numpy(layout.flatten(dict(zip(layout.names, parameters, strict=True)))).to(self.model.device)
        total, answered, refused, losses = self._sum(vector, instruction)
        payload = compression.smallest(total)
        metrics = {}
        if instruction.report_metrics and self.policy.allow_metrics and answered:
            metrics["loss"] = float(torch.stack(losses).to(torch.float32).nan_to_num().sum(dtype=torch.float64))
        answer = Answer(refused=refused, payload=payload.header, seeded_noise=self.noise_seed is not None, metrics=metrics)
        return list(payload.arrays), 1, {wire.KEY: answer.to_json(instruction.clients)}

    @abstractmethod
    def _sum(self, vector: Tensor, instruction: Instruction) -> tuple[Tensor, list[str], dict[str, str], list[Tensor]]:
        """Return the exact float64 sum [d] of the rows, who is in it, who is not and why, and the losses of those in it."""


class DPClient(NodeClient):
    """A Flower client for the strategies of this package with client-level privacy, around a recipe of local training.

    It answers with the sum of its clients' updates, each clipped to the L2 norm that the server names and its own policy allows,
    each with its own noise if the server asks for noise on clients, each compressed after that. It sends no record, no example
    count and, unless its policy allows it, no metric.

    Args:
        model: the architecture; its weights are overwritten. Without BatchNorm.
        clients: the records of every client that lives here, by its stable name; on a device one.
        training: the recipe of local training.
        policy: this client's own limits.
        device: where to train; by default the GPU if this process has one, else the CPU.
        seed: governs the order of records, never the noise.
        noise_seed: for tests only: fixed noise, of which the server is told, so that the run counts as not private.
        engine: "one_by_one", or "batched" in a simulation: `flower_dp.clients.engines`.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        clients: Mapping[str, Records],
        training: LocalTraining,
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
        engine: str = "one_by_one",
    ) -> None:
        super().__init__(model=model, clients=clients, policy=policy, device=device, seed=seed, noise_seed=noise_seed)
        self.training = training
        self.engine = checks.one_of("engine", engine, ENGINES)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods with one noised sum of clipped updates."""
        return ("dp-fedavg", "dp-fedsam")

    def _sum(self, vector: Tensor, instruction: Instruction) -> tuple[Tensor, list[str], dict[str, str], list[Tensor]]:
        order = ClientLevelOrder.of(instruction)
        self.policy.check_noise(order)
        # All clients of the round round to this lattice, so that their sum, here and on the server, is exact.
        scale = order.noise_std or instruction.noise_multiplier * instruction.clip_norm
        step = noise.lattice_step(scale, clip_norm=instruction.clip_norm, dimension=vector.numel())
        refused = {name: "not hosted here" for name in instruction.clients if name not in self.clients}
        hosted: dict[str, Records] = {}
        for name in [name for name in instruction.clients if name not in refused]:
            try:
                hosted[name] = self.clients[name]
            except Exception as error:
                refused[name] = failure(name, error)
        answered: list[str] = []
        losses: list[Tensor] = []
        trained: list[Tensor] = []
        total = torch.zeros_like(vector, dtype=torch.float64)
        rows = local_updates(
            vector,
            list(hosted.values()),
            self.training,
            model=self.model,
            server_round=instruction.server_round,
            seeds=[batch_seed(self.seed, instruction.server_round, name) for name in hosted],
            losses=trained,
            engine=self.engine,
        )
        for name, row in zip(hosted, rows, strict=True):
            if isinstance(row, Exception):
                refused[name] = failure(name, row)
                continue
            try:
                clipped = noise.toward_zero(clip_l2(row, instruction.clip_norm), step)
            except ValueError as error:
                refused[name] = str(error)
                continue
            total += self._released(clipped, step, order, instruction, name)
            answered.append(name)
            losses.append(trained[-1])
        return total, answered, refused, losses

    def _released(self, clipped: Tensor, step: float, order: ClientLevelOrder, instruction: Instruction, name: str) -> Tensor:
        """Return a clipped update as it leaves its client: with its noise, then compressed."""
        noised: Tensor = clipped
        if order.noise_std:
            rng = self.generator(instruction, name, on=clipped)
            noised = clipped + noise.gaussian(clipped, order.noise_std, step, rng)
        if order.keep_ratio == 1:
            return noised
        sparse = compression.decode(compression.top_k(noised, order.keep_ratio), noised.numel())
        return torch.from_numpy(sparse).to(noised.device)


def failure(name: str, error: Exception) -> str:
    """Log why a client fails; return what the server may know of it: the kind of error, without a word of the data."""
    log.warning("client %s: %s: %s", name, type(error).__name__, error)
    return f"training failed: {type(error).__name__}"
