"""Training of one client after another, by autograd, for any model."""

import torch
from torch import Tensor

from flower_dp.clients.reasons import contained
from flower_dp.clients.training.devices import reproducible
from flower_dp.clients.training.recipe import FlatModel, Training
from flower_dp.clients.training.records import Records

# A client's update [d] and mean training loss, or its error.
Trained = tuple[Tensor, Tensor] | Exception


def train_one(vector: Tensor, records: Records, training: Training, *, model: FlatModel, server_round: int, seed: int) -> Trained:
    """Train one client from the global model."""
    try:
        model.vector.copy_(vector)
        model.reset()
        with contained(), reproducible(model.device):
            loss = training.train(model, records, server_round, torch.Generator().manual_seed(seed))
        row = model.vector.to(vector.device) - vector
        model.reset()  # a later evaluation of the model must not depend on what training left there
        return row, loss
    except Exception as error:
        model.reset_buffers()
        return error
