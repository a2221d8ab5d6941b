"""Record canaries: made-up records in the place of clients' own, for methods that protect records and whose messages are private.

A coin chooses a canary's inputs: x or -x, under one label. The two gradients are about opposite, and longer than the clip: a
replaced record can't change a clipped sum by more.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flower_dp.audit.case import row_of
from flower_dp.clients import FlatModel, TensorRecords
from flower_dp.clients.scaffold import ControlVariate
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.per_record import record_gradients
from flower_dp.core import checks
from flower_dp.core.clipping import clip_l2
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.simulation.local_grid import Sent
from flower_dp.wire import Instruction

Random = np.random.Generator
# The length of a canary's inputs in clip norms: the gradient is longer than the clip. Much longer inputs would be fitted at once,
# by chance, and have no gradient then.
_LENGTH = 3.0
_CHUNK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCanaries:
    """One client's canaries.

    Attributes:
        coins: which coins of the audit [k].
        records: the client's records with the canaries among them.
        inputs: x of the canaries [k, ...], as the model takes them.
        labels: [k].
    """

    coins: np.ndarray
    records: TensorRecords
    inputs: Tensor
    labels: Tensor


def planted(
    clients: Mapping[str, TensorRecords], choices: np.ndarray, *, labels: Sequence[int], clip_norm: float, rng: Random
) -> dict[str, RecordCanaries]:
    """Put canaries in the place of clients' records; how many records a client has, and so the claim, stays what it is.

    Args:
        clients: their own records; the coins are dealt to them in turn.
        choices: the coins [m], +1 or -1.
        labels: of the task.
        clip_norm: L2 bound of a record's gradient.
        rng: not that of the run's noise.

    Raises:
        ValueError: if the clients have fewer records than there are coins, or their inputs are several tensors.
    """
    sizes = {name: len(records) for name, records in clients.items()}
    if len(choices) > sum(sizes.values()):
        raise checks.bad("num_canaries", len(choices), f"at most {sum(sizes.values())}, the number of all records")
    # The first place of every client, then the second of those that have two, and so on.
    places = sorted((place, name) for name, size in sizes.items() for place in range(size))
    owners = [name for _, name in places[: len(choices)]]
    dealt = {name: np.array([coin for coin, one in enumerate(owners) if one == name]) for name in dict.fromkeys(owners)}

    def among(records: TensorRecords, own: np.ndarray) -> RecordCanaries:
        inputs, targets = (one.clone() for one in records.batch(torch.arange(len(records)), torch.device("cpu")))
        signs = torch.from_numpy(2 * rng.integers(0, 2, (len(own), *inputs.shape[1:])) - 1).to(inputs.dtype)
        made = signs * (_LENGTH * clip_norm / math.sqrt(signs[0].numel()))
        under = torch.from_numpy(rng.choice(np.asarray(labels), len(own))).to(targets.dtype)
        places = torch.from_numpy(rng.permutation(len(records))[: len(own)])
        coin = torch.from_numpy(choices[own]).to(inputs.dtype).view(-1, *[1] * (inputs.ndim - 1))
        inputs[places], targets[places] = coin * made, under
        return RecordCanaries(coins=own, records=TensorRecords(inputs=inputs, targets=targets), inputs=made, labels=under)

    return {name: among(clients[name], own) for name, own in dealt.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What clients have sent, as their server sees it: noised updates along their own gradients.

    Attributes:
        names: of the one client of every node.
        drift: the steps of SCAFFOLD, whose updates have public control variates in them; None for no such.
        kept: the control variates of clients so far.
    """

    names: Mapping[int, str]
    drift: FedPAQSteps | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)

    def rows(self, exchanged: Mapping[int, Sent]) -> dict[str, np.ndarray]:
        """Return every client's row of a round [d], by its name.

        Args:
            exchanged: messages and replies by node.
        """
        found = {}
        for node, sent in exchanged.items():
            with suppress(RuntimeError):  # it has sent none
                found[self.names[node]] = row_of(sent)
        return {name: self._own(name, *one) for name, one in found.items()}

    def _own(self, name: str, asked: Instruction, row: np.ndarray) -> np.ndarray:
        """Return a row without drift: the client's next control variate is the mean of its noised gradients."""
        if self.drift is None:
            return row
        divisor = self.drift.num_local_steps * self.drift.step_size(asked.server_round)
        common = torch.from_numpy(asked.ask.vectors["control"].astype(np.float64))
        kept = ControlVariate(common=common, divisor=divisor)(torch.from_numpy(row), self.kept.get(name))
        self.kept[name] = kept
        return -kept.numpy()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordScores:
    """Scores of record canaries: inner products of clients' rows with the clipped gradients of x and of -x.

    Attributes:
        canaries: by client.
        model: of the task; its weights are overwritten.
        loss: of training.
        clip_norm: L2 bound of a record's gradient.
        scores: so far [m]; the higher, the likelier is x.
    """

    canaries: Mapping[str, RecordCanaries]
    model: FlatModel
    loss: Loss
    clip_norm: float
    scores: np.ndarray

    def see(self, vector: np.ndarray, name: str, row: np.ndarray) -> None:
        """Add one reply [d] to a model [d].

        A row is an update, against the gradients. Its length is that of its noise, more or less: over it, the rounds of a
        shrinking step size count alike.
        """
        length = float(np.linalg.norm(row))
        if name not in self.canaries or not length:
            return
        own, back = self.canaries[name], torch.from_numpy(-row.astype(np.float64) / length)
        self.model.vector.copy_(torch.from_numpy(vector))
        found = []
        for inputs, labels in zip(torch.split(own.inputs, _CHUNK), torch.split(own.labels, _CHUNK), strict=True):
            products = []
            for side in (inputs, -inputs):
                gradients, _ = record_gradients(self.model, side, labels, loss=self.loss)
                products.append(clip_l2(gradients, self.clip_norm).to(torch.float64) @ back)
            found.append(products[0] - products[1])
        self.scores[own.coins] += torch.cat(found).numpy()
