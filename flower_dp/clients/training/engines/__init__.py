"""Local training of many clients: global vector + their records + a recipe -> one update row per client.

There are two engines. `one_by_one` trains client after client with autograd; it supports any model, and is the only engine for
real clients. `batched` is for simulations and trains groups of clients at once. With either, one client's data change no bit of
another client's row. Otherwise training could magnify such a change, and no clip would bound the effect of one client on the rows
of others.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from flower_dp.clients.reply.pipeline import Trained
from flower_dp.clients.training.devices import is_accelerator
from flower_dp.clients.training.engines.batched import Trainer, num_slots
from flower_dp.clients.training.engines.one_by_one import train_one
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import Records
from flower_dp.clients.training.regularizers import LUS
from flower_dp.core import checks

__all__ = ["ENGINES", "choose_engine", "local_updates", "num_slots"]
ENGINES = ("one_by_one", "batched")


def choose_engine(module: nn.Module, device: torch.device) -> str:
    """Return the faster engine for many clients of a simulation, by layers and device, never by data.

    Convolutions on a CPU gain nothing from groups, and clients of a group wait for the one with the most records.
    """
    convolves = any(isinstance(layer, _ConvNd) for layer in module.modules())
    return "one_by_one" if convolves and not is_accelerator(device) else "batched"


def local_updates(
    vector: Tensor,
    clients: Sequence[Records],
    training: Training,
    *,
    model: FlatModel,
    server_round: int,
    seeds: Sequence[int],
    losses: list[Tensor] | None = None,
    engine: str = "one_by_one",
    group_size: int | None = None,
) -> Iterator[Tensor | Exception]:
    """Yield every client's update, trained model minus global model, one new row [d] each, in order.

    If a client's training fails, its error is yielded instead of its row. It affects no other client's row.

    Args:
        vector: global model [d], float32, on the device of the rows: the model's, or the CPU.
        clients: records of each client.
        training: recipe of local training; its sparsifier is applied last to every row.
        model: model to train; its weights are overwritten, its buffers are restored afterwards.
        server_round: round number, from 1.
        seeds: one seed per client, for the order of its records and for all other draws.
        losses: list that receives the mean training loss of every client that trained, before its row is yielded.
        engine: "one_by_one", or "batched" in a simulation.
        group_size: number of clients that the batched engine trains at once on a GPU; see `num_slots`.

    Raises:
        ValueError: for an unknown engine, a group size below 1, or if the numbers of seeds and clients differ.
    """
    checks.one_of("engine", engine, ENGINES)
    if group_size is not None:
        checks.integer("group_size", group_size, at_least=1)
    if len(seeds) != len(clients):
        raise ValueError(f"seeds: {len(seeds)} for {len(clients)} clients: must be one for each")
    if engine == "batched":
        slots = num_slots(model.layout.size, model.device, group_size)
        trained = Trainer(
            vector=vector,
            clients=clients,
            training=training,
            model=model,
            server_round=server_round,
            seeds=seeds,
            num_slots=slots,
        ).results()
    else:
        pairs = zip(clients, seeds, strict=True)
        trained = (train_one(vector, data, training, model=model, server_round=server_round, seed=seed) for data, seed in pairs)
    return _rows(trained, training.sparsifier, losses)


def _rows(trained: Iterator[Trained], sparsifier: LUS | None, losses: list[Tensor] | None) -> Iterator[Tensor | Exception]:
    for result in trained:
        if isinstance(result, Exception):
            yield result
            continue
        row, loss = result
        if losses is not None:
            losses.append(loss)
        yield row if sparsifier is None else sparsifier(row)
