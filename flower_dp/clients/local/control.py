"""Control variates (SCAFFOLD): the vector that each client keeps from round to round, in its node's Flower state."""

import logging
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from flower_dp.clients.reply.pipeline import Pipeline
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.privacy.release import Release

log = logging.getLogger("flwr")

KEY = "flower-dp.control"


@runtime_checkable
class KeepsControl(Protocol):
    """A recipe whose clients each keep a vector c_i, and which uses the vector c that the server sends with the model."""

    def corrected(self, release: Release, *, model: FlatModel, server_round: int, drift: Tensor) -> Pipeline:
        """Return the pipeline of one client's reply, with `drift` = c - c_i [d] added to every step's gradient."""

    def change(self, row: Tensor, *, server_round: int, common: Tensor) -> Tensor:
        """Return c_i' - c_i [d], a function of the row that was sent and of c alone."""


class ControlVariates:
    """The control variates of all clients of a node: float32 vectors computed from messages that carried all their noise."""

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    def read(self, name: str, size: int) -> Tensor | None:
        """Return a client's own vector [size]; None if the state has none that fits."""
        record = self._state.array_records.get(KEY)
        if record is None or name not in record:
            return None
        try:
            kept = record[name].numpy()
        except Exception:  # damaged bytes may raise any error
            kept = np.zeros(0)
        if kept.shape != (size,) or kept.dtype != np.float32 or not np.isfinite(kept).all():
            log.warning("client %s: its control variate is damaged and starts at zero", name)
            return None
        return torch.from_numpy(kept.copy())

    def write(self, name: str, vector: Tensor) -> None:
        """Store a client's vector for its next round."""
        record = dict(self._state.array_records.get(KEY, ArrayRecord()).items())
        record[name] = FlowerArray(vector.detach().to("cpu", torch.float32).numpy())
        self._state[KEY] = ArrayRecord(record)
