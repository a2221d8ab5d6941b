"""Record canaries: made-up records in the place of clients' own, for methods that protect records and whose messages are private.

A coin chooses the label of a canary's record. The gradients of the same inputs with two labels differ about as much as two clipped
gradients can, and the two data sets are neighbours under replace-one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from flower_dp.clients import FlatModel, TensorRecords
from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.per_record import record_gradients
from flower_dp.core.clipping import clip_l2
from flower_dp.strategies.exchange import Asked, PlainExchange
from flower_dp.strategies.releases.replies import Collected, collect

_CHUNK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecords:
    """One client's canaries.

    Attributes:
        coins: which coins of the audit [k].
        records: the client's records with the canaries among them.
        inputs: of the canaries, as the model takes them.
        labels: of every canary [k, 2]: under +1, under -1.
    """

    coins: np.ndarray
    records: TensorRecords
    inputs: Tensor
    labels: Tensor


def planted(
    clients: Mapping[str, TensorRecords], choices: np.ndarray, *, labels: Sequence[int], rng: np.random.Generator
) -> dict[str, ClientRecords]:
    """Put canaries in the place of records of all clients in turn; sizes, and so the claim, stay what they are.

    A canary's inputs are the smallest or the largest value of the task's records in every place, by a coin: as long, and as
    different from others, as records can be.

    Args:
        clients: their own records.
        choices: the coins [m], +1 or -1.
        labels: of the task.
        rng: not that of the run's noise.

    Raises:
        ValueError: if the clients have fewer records than there are coins, or other inputs than one tensor.
    """
    names, own = list(clients), {name: np.empty(0, np.int64) for name in clients}
    room, order = {name: len(clients[name]) for name in names}, []
    while len(order) < len(choices):
        free = [name for name in names if room[name]]
        if not free:
            raise ValueError(f"num_canaries={len(choices)}: the clients have {len(order)} records in all")
        for name in free[: len(choices) - len(order)]:
            room[name] -= 1
            order.append(name)
    for name in names:
        own[name] = np.array([coin for coin, owner in enumerate(order) if owner == name], np.int64)
    return {name: _planted(clients[name], one, choices[one], labels, rng) for name, one in own.items() if len(one)}


def _planted(
    records: TensorRecords, coins: np.ndarray, choices: np.ndarray, labels: Sequence[int], rng: np.random.Generator
) -> ClientRecords:
    if not isinstance(records.inputs, Tensor):
        raise ValueError("inputs: record canaries are for records of one tensor")
    everyone = records.inputs
    inputs, targets = (one.clone() for one in records.rows(torch.arange(len(records)), torch.device("cpu")))
    places = torch.from_numpy(rng.permutation(len(records))[: len(coins)])
    high = torch.from_numpy(rng.integers(0, 2, (len(coins), *everyone.shape[1:])).astype(bool))
    made = torch.where(high, everyone.max(), everyone.min())
    pairs = np.stack([rng.permutation(np.asarray(labels))[:2] for _ in coins])
    chosen = np.where(choices > 0, pairs[:, 0], pairs[:, 1])
    inputs[places], targets[places] = made, torch.from_numpy(chosen).to(targets.dtype)
    return ClientRecords(
        coins=coins,
        records=replace(records, inputs=inputs, targets=targets, indices=None),
        inputs=made if records.transform is None else torch.cat([records.transform(one[None]) for one in made]),
        labels=torch.from_numpy(pairs).to(targets.dtype),
    )


@dataclass(slots=True, kw_only=True)
class ReplyTap:
    """The exchange of a run whose nodes host one client each; it shows every client's row to the auditor as well.

    Attributes:
        see: called with the global model [d], a client's name and its row [d].
        plain: the real exchange.
    """

    see: Callable[[np.ndarray, str, np.ndarray], None]
    plain: PlainExchange = field(default_factory=PlainExchange)

    def messages(self, *arguments: object, **named: object) -> list:  # type: ignore[type-arg]
        """Return the real exchange's messages."""
        return self.plain.messages(*arguments, **named)  # type: ignore[arg-type]

    def replies(self, *arguments: object, **named: object) -> list:  # type: ignore[type-arg]
        """Return the real exchange's replies."""
        return list(self.plain.replies(*arguments, **named))  # type: ignore[arg-type]

    def total(self, asked: Asked, replies: Sequence, *, seeded: bool) -> Collected:  # type: ignore[type-arg]
        """Show every reply alone, then return the real sum."""
        for reply in replies:
            node = reply.metadata.src_node_id
            one = collect([reply], asked={node: asked.now.asked[node]}, sent=asked.sent, limits=asked.limits, stock=None)
            for name in one.clients:
                self.see(asked.now.vector, name, one.total)
        return self.plain.total(asked, replies, seeded=seeded)


@dataclass(slots=True, kw_only=True)
class RecordScores:
    """Scores of record canaries from clients' rows: inner products with the clipped gradients of either label.

    Attributes:
        canaries: by client.
        model: of the task; its weights are overwritten.
        loss: of training.
        clip_norm: L2 bound of a record's gradient.
        scores: so far [m].
    """

    canaries: Mapping[str, ClientRecords]
    model: FlatModel
    loss: Loss
    clip_norm: float
    scores: np.ndarray

    def see(self, vector: np.ndarray, name: str, row: np.ndarray) -> None:
        """Add one reply to a model [d]: an update along negative gradients, which noise makes about as long in every round."""
        if name not in self.canaries or not (length := float(np.linalg.norm(row))):
            return
        self.model.vector.copy_(torch.from_numpy(vector))
        own = self.canaries[name]
        towards = torch.from_numpy(row / length)
        found = []
        for start in range(0, len(own.coins), _CHUNK):
            part = slice(start, start + _CHUNK)
            products = [
                clip_l2(record_gradients(self.model, own.inputs[part], own.labels[part, side], loss=self.loss)[0], self.clip_norm)
                .to(torch.float64)
                @ towards
                for side in (0, 1)
            ]
            found.append(products[1] - products[0])
        self.scores[own.coins] += torch.cat(found).numpy()
