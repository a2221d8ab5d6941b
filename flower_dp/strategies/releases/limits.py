"""The limits that a server enforces on replies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flower_dp.core import noise
from flower_dp.core.clipping import clip_l2, l2_norms

# The largest allowed ratio of a reply's norm to the largest norm of an honest reply.
HONEST_NORMS = 2.0
# Entries of a vector that are added up at once, so that their copies stay in the CPU's cache.
_BLOCK = 2**15


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimits:
    """The limits of the replies to one request.

    Attributes:
        length: length of the vectors that are added up.
        mask: indices [k] of the coordinates that clients were told to send; None for all.
        clip_norm: L2 bound on the vector of one client, which the server enforces by clipping. None if vectors carry their own
            noise, so that only the client can have clipped.
        honest_indicator: largest magnitude of the last entry, the sum of the indicators of these clients; exceeded with a
            probability below 1e-20. None without indicators. `clip_norm` bounds the other entries.
        step: lattice step to which the server rounds: clipped vectors toward zero, others, which honest clients have rounded
            already, to the nearest multiple. So the sum is exact, and its last bits tell of no single row. 0: no lattice.
        honest_norm: L2 norm that the sum of these clients' honest rows exceeds with a probability below 1e-20, if clients add
            noise. The server refuses a reply of more than twice that norm.
    """

    length: int
    mask: np.ndarray | None = None
    clip_norm: float | None = None
    honest_indicator: Callable[[Sequence[str]], float] | None = None
    step: float = 0.0
    honest_norm: Callable[[Sequence[str]], float]

    def add(self, total: np.ndarray, vector: np.ndarray, clients: Sequence[str], *, rest: np.ndarray | None = None) -> None:
        """Add the sum [length] of some clients' vectors, masked, clipped and rounded.

        Args:
            total: a float64 sum [length], changed in place.
            vector: the vector to add.
            clients: names of the clients whose vectors it is the sum of.
            rest: rounding errors of `total`, changed in place, so that the order of vectors does not matter; None on a lattice.

        Raises:
            ValueError: if the vector is not finite, or longer than that of honest clients; nothing is added then.
        """
        vector = self._checked(vector, clients)
        for start in range(0, self.length, _BLOCK):
            block = slice(start, start + _BLOCK)
            if self.clip_norm is not None:
                part = noise.round_toward_zero(vector[block], self.step)
            else:
                part = noise.round_to_nearest(np.asarray(vector[block], np.float64), self.step)
            if rest is not None:
                rest[block] += _lost(total[block], np.asarray(part, np.float64))
            total[block] += part

    def _checked(self, vector: np.ndarray, clients: Sequence[str]) -> np.ndarray:
        """Return the vector masked and clipped, before it is rounded."""
        if self.mask is not None:
            kept, vector = vector[self.mask], np.zeros_like(vector)
            vector[self.mask] = kept
        if not np.isfinite(vector).all():
            raise ValueError("update has NaN or infinite entries")
        if self.clip_norm is not None:
            # Clients are not trusted to have clipped. A node's sum of n clipped vectors has norm at most n clip norms.
            return self._clipped(vector, clients, len(clients) * self.clip_norm)
        if (norm := float(l2_norms(vector))) > HONEST_NORMS * self.honest_norm(clients):
            raise ValueError(f"update has norm {norm:.3g}: more than {HONEST_NORMS:g} times that of any honest one")
        if self.honest_indicator is not None and abs(vector[-1]) > self.honest_indicator(clients):
            raise ValueError(f"indicator is {vector[-1]:.3g}: further from 0 than that of any honest update")
        return vector

    def _clipped(self, vector: np.ndarray, clients: Sequence[str], bound: float) -> np.ndarray:
        """Return the vector with an L2 norm of at most the bound, and its indicator with the magnitude of honest ones."""
        if self.honest_indicator is None:
            return _clipped(vector, bound)
        largest = self.honest_indicator(clients)
        return np.append(_clipped(vector[:-1], bound), min(max(float(vector[-1]), -largest), largest))


def _clipped(vector: np.ndarray, bound: float) -> np.ndarray:
    """Return the vector with an L2 norm of at most the bound; unchanged if its norm is within the bound."""
    # `1 - 2**-40` covers the rounding of the norm. A shorter vector stays bit-identical, so it stays on the lattice.
    return vector if float(l2_norms(vector)) <= bound * (1 - 2.0**-40) else clip_l2(vector, bound)


def _lost(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the exact rounding error of the float64 sum of two vectors (Knuth's TwoSum)."""
    both = first + second
    added = both - first
    return np.asarray((first - (both - added)) + (second - added))
