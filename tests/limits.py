"""What the server's limits let into a sum."""

from collections.abc import Sequence

import numpy as np

from flower_dp.strategies.releases.limits import ReplyLimits


def accepted(limits: ReplyLimits, vector: np.ndarray, clients: Sequence[str]) -> np.ndarray:
    """Return what is added up of some clients' vector."""
    total = np.zeros(limits.length)
    limits.add(total, vector, clients)
    return total
