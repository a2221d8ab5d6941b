"""Training of one client after another, by autograd, for any model."""

import torch
from torch import Tensor

from flower_dp.clients.reply.pipeline import Trained, one_by_one
from flower_dp.clients.training.devices import reproducible
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import Records


def train_one(vector: Tensor, records: Records, training: Training, *, model: FlatModel, server_round: int, seed: int) -> Trained:
    """Train one client from the global model; return its update [d] and mean training loss, or its error."""

    def row(_: None) -> tuple[Tensor, Tensor]:
        model.vector.copy_(vector)
        with reproducible(model.device):
            loss = training.train(model, records, server_round, torch.Generator().manual_seed(seed))
        return model.vector.to(vector.device) - vector, loss

    # A later evaluation of the model must not depend on what training left there either.
    return next(one_by_one([None], row, reset=model.reset))
