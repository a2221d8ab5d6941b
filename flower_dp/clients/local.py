"""The client of methods whose every message is private on its own: own budget, own noise, own account."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_dp.clients.account import Account
from flower_dp.clients.client import NodeClient, failure
from flower_dp.clients.draws import batch_seed
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.records import Records
from flower_dp.clients.training import FlatModel
from flower_dp.privacy.release import Release
from flower_dp.privacy.client_terms import Terms
from flower_dp.wire import Instruction, LocalOrder

# How far apart two machines may compute one noise multiplier from one budget.
_TOLERANCE = 1e-6


class LocalRecipe(Protocol):
    """How one client makes a reply that is private on its own."""

    @property
    def method(self) -> str:
        """Name of the method that this is a reply of."""

    def terms(self, name: str, records: Records) -> Terms:
        """Return the client's terms, from its own budget and data size alone."""

    def reply(
        self,
        vector: Tensor,
        records: Records,
        release: Release,
        *,
        model: FlatModel,
        server_round: int,
        seed: int,
        rng: np.random.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Return the noised row [d] that leaves, and the training loss, a 0-d tensor that stays.

        Noise and every secret choice come from `rng`, made for this reply; `seed` is public and governs the order of records only.
        """


class LocalDPClient(NodeClient):
    """A Flower client whose clients' replies are private one by one, before they are added up.

    Noise follows from each client's own terms. What the server takes them to be is compared with them, and a client that finds
    them different, or its own noise to be less, does not reply: the server would state too small an epsilon. Each reply is
    charged to the client's account, in the node's Flower state, before its records are touched; who can't pay does not reply,
    whatever the server says of the round.

    The node answers with the weighted sum of its clients' rows, with the weights that the server names: weighing a private row
    costs nothing.

    Args:
        model: the architecture; its weights are overwritten. Without BatchNorm.
        clients: the records of every client that lives here, by its stable name; on a device one.
        recipe: how a reply is made, for example `FedSGDDPCRecipe`.
        state: the node's state, `context.state` of the Context that `client_fn` receives; `client_app` attaches it itself.
        policy: more limits of this client.
        device: where to train; by default the GPU if this process has one, else the CPU.
        seed: governs the order of records, never noise or the choice of records.
        noise_seed: for tests only: fixed noise, of which the server is told, so that the run counts as not private.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        clients: Mapping[str, Records],
        recipe: LocalRecipe,
        state: RecordDict | None = None,
        policy: ClientPolicy | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        noise_seed: int | None = None,
    ) -> None:
        super().__init__(model=model, clients=clients, policy=policy, device=device, seed=seed, noise_seed=noise_seed)
        self.recipe = recipe
        if state is not None:
            self.attach(state)

    @property
    def methods(self) -> tuple[str, ...]:
        """The method of the recipe."""
        return (self.recipe.method,)

    def _sum(self, vector: Tensor, instruction: Instruction) -> tuple[Tensor, list[str], dict[str, str], list[Tensor]]:
        if self.state is None:
            raise ValueError("state: this client has no account; pass state=context.state, or use flower_dp.clients.client_app")
        order = LocalOrder.of(instruction)
        if self.policy.min_noise_std:
            raise ValueError(f"min_noise_std={self.policy.min_noise_std:g}: this client's noise follows from its own budget alone")
        weights = dict(zip(instruction.clients, order.weights, strict=True))
        agreed, refused = self._agreed(instruction, order)
        refused |= Account(self.state).charge(agreed)
        answered, losses = [], []
        total = torch.zeros_like(vector, dtype=torch.float64)
        for name in [name for name in agreed if name not in refused]:
            self.model.reset_buffers()
            try:
                row, loss = self.recipe.reply(
                    vector,
                    self.clients[name],
                    agreed[name].release,
                    model=self.model,
                    server_round=instruction.server_round,
                    seed=batch_seed(self.seed, instruction.server_round, name),
                    rng=self.generator(instruction, name),
                )
            except Exception as error:
                refused[name] = failure(name, error)
                continue
            total += weights[name] * row.to(torch.float64)
            answered.append(name)
            losses.append(loss)
        self.model.reset_buffers()  # what a client's data left there must not be told by the next one's reply
        return total.to(torch.float32), answered, refused, losses

    def _agreed(self, instruction: Instruction, order: LocalOrder) -> tuple[dict[str, Terms], dict[str, str]]:
        """Return the terms of the clients whose own terms are what the server says, and why the others refuse."""
        agreed: dict[str, Terms] = {}
        refused: dict[str, str] = {}
        said = zip(instruction.clients, order.terms, order.noise_multipliers, strict=True)
        for name, kind, multiplier in said:
            if name not in self.clients:
                refused[name] = "not hosted here"
                continue
            try:
                records = self.clients[name]
                len(records)
            except Exception as error:
                refused[name] = failure(name, error)
                continue
            try:
                terms = self.recipe.terms(name, records)
            except ValueError as error:
                refused[name] = str(error)
                continue
            own = terms.release.mechanism.noise_multiplier
            if instruction.clip_norm != terms.release.clip_norm:
                refused[name] = f"clip_norm={instruction.clip_norm:g}: this client's own is {terms.release.clip_norm:g}"
            elif kind != terms.kind:
                refused[name] = f"the server's terms ({kind}) are not this client's own ({terms.kind})"
            elif own < multiplier * (1 - _TOLERANCE):
                refused[name] = f"noise_multiplier={multiplier:g}: by this client's own budget it is {own:g}"
            else:
                agreed[name] = terms
        return agreed, refused
