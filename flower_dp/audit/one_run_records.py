"""Record canaries: synthetic records in place of clients' own, for methods that protect records and whose messages are private.

A coin chooses a canary's inputs: x or -x, under one label. The two gradients are about opposite, and longer than the clip: no
replaced record can change a clipped sum by more.
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
# Length of a canary's inputs in clip norms, so that the gradient is longer than the clip. The model would fit much longer inputs
# at once, by chance, and then they would have no gradient.
_LENGTH = 3.0
_CHUNK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCanaries:
    """One client's canaries.

    Attributes:
        coins: indices [k] of the audit's coins.
        records: records of the client, with the canaries among them.
        inputs: inputs x of the canaries [k, ...], as the model takes them.
        labels: labels of the canaries [k].
    """

    coins: np.ndarray
    records: TensorRecords
    inputs: Tensor
    labels: Tensor


def planted(
    clients: Mapping[str, TensorRecords], choices: np.ndarray, *, labels: Sequence[int], clip_norm: float, rng: Random
) -> dict[str, RecordCanaries]:
    """Replace clients' records by canaries. The number of records of each client, and so the claim, does not change.

    Args:
        clients: records of every client; the coins are dealt to the clients in turn.
        choices: coins [m], +1 or -1.
        labels: labels of the task.
        clip_norm: L2 bound of a record's gradient.
        rng: generator, not that of the run's noise.

    Raises:
        ValueError: if the clients have fewer records than there are coins, or their inputs are several tensors.
    """
    sizes = {name: len(records) for name, records in clients.items()}
    if len(choices) > sum(sizes.values()):
        raise checks.bad("num_canaries", len(choices), f"at most {sum(sizes.values())}, the number of all records")
    # The first place of every client, then the second of those that have two, and so on.
    places = sorted((place, name) for name, size in sizes.items() for place in range(size))
    owners = [name for _, name in places[: len(choices)]]
    dealt = {name: np.array([coin for coin, owner in enumerate(owners) if owner == name]) for name in dict.fromkeys(owners)}

    def among(records: TensorRecords, coins: np.ndarray) -> RecordCanaries:
        inputs, targets = (tensor.clone() for tensor in records.batch(torch.arange(len(records)), torch.device("cpu")))
        signs = torch.from_numpy(2 * rng.integers(0, 2, (len(coins), *inputs.shape[1:])) - 1).to(inputs.dtype)
        x = signs * (_LENGTH * clip_norm / math.sqrt(signs[0].numel()))
        new_labels = torch.from_numpy(rng.choice(np.asarray(labels), len(coins))).to(targets.dtype)
        places = torch.from_numpy(rng.permutation(len(records))[: len(coins)])
        values = torch.from_numpy(choices[coins]).to(inputs.dtype).view(-1, *[1] * (inputs.ndim - 1))
        inputs[places], targets[places] = values * x, new_labels
        return RecordCanaries(coins=coins, records=TensorRecords(inputs=inputs, targets=targets), inputs=x, labels=new_labels)

    return {name: among(clients[name], coins) for name, coins in dealt.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Clients' messages as the server sees them: noised updates along the clients' own gradients.

    Attributes:
        names: name of the one client of every node.
        drift: steps of SCAFFOLD, whose updates contain public control variates; None for other methods.
        kept: current control variates by client.
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
            with suppress(RuntimeError):  # its reply has no row
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
    """The scores of record canaries: inner products of clients' rows with the clipped gradients of x and of -x.

    Attributes:
        canaries: canaries by client.
        model: model of the task; its weights are overwritten.
        loss: loss of training.
        clip_norm: L2 bound of a record's gradient.
        scores: current scores [m]; the higher, the likelier x.
    """

    canaries: Mapping[str, RecordCanaries]
    model: FlatModel
    loss: Loss
    clip_norm: float
    scores: np.ndarray

    def see(self, vector: np.ndarray, name: str, row: np.ndarray) -> None:
        """Add the scores of one reply [d] to a model [d].

        A row is an update, against the gradients. Its length is about that of its noise. Divided by its length, the rounds of a
        shrinking step size count alike.
        """
        length = float(np.linalg.norm(row))
        if name not in self.canaries or not length:
            return
        canaries, back = self.canaries[name], torch.from_numpy(-row.astype(np.float64) / length)
        self.model.vector.copy_(torch.from_numpy(vector))
        differences = []
        for inputs, labels in zip(torch.split(canaries.inputs, _CHUNK), torch.split(canaries.labels, _CHUNK), strict=True):
            products = []
            for side in (inputs, -inputs):
                gradients, _ = record_gradients(self.model, side, labels, loss=self.loss)
                products.append(clip_l2(gradients, self.clip_norm).to(torch.float64) @ back)
            differences.append(products[0] - products[1])
        self.scores[canaries.coins] += torch.cat(differences).numpy()
