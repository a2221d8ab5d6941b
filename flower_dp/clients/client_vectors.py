"""Vectors that a node's clients keep from round to round, one each, in the node's Flower state, which lasts one run.

A vector is written when its reply is ready to leave, after the client's account was charged. If the node fails before that, its
clients still have their previous vectors. If the message is lost afterwards, they are a round ahead of the server, which costs
accuracy and no privacy.
"""

import logging
from collections.abc import Mapping

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict

log = logging.getLogger("flwr")

KEY = "flower-dp.kept"


def load_vector(state: RecordDict, name: str, size: int) -> np.ndarray | None:
    """Return the vector [size], float32, that a client has kept; None if the state has none that fits."""
    record = state.array_records.get(KEY)
    if record is None or name not in record:
        return None
    try:
        kept = record[name].numpy()
    except Exception:  # damaged bytes may raise any error
        kept = np.zeros(0)
    if kept.shape != (size,) or kept.dtype != np.float32 or not np.isfinite(kept).all():
        log.warning("Client %s: its vector of an earlier round is damaged, so it starts without one", name)
        return None
    return np.array(kept)


def store_vectors(state: RecordDict, vectors: Mapping[str, np.ndarray]) -> None:
    """Store vectors, float32, for their clients' next round, all or none of them."""
    if vectors:
        record = dict(state.array_records.get(KEY, ArrayRecord()).items())
        state[KEY] = ArrayRecord(record | {name: FlowerArray(vector) for name, vector in vectors.items()})
