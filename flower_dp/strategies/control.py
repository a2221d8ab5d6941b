"""SCAFFOLD's control variate: a vector that the server sends with the model and computes from the messages."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flower_dp.core import checks, compression
from flower_dp.core.clipping import l2_norms
from flower_dp.core.serialization import serializable
from flower_dp.strategies.releases.replies import CollectedReplies

log = logging.getLogger("flwr")

_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """Bounds on the norms of honest noised mean gradients, each exceeded with a probability below 1e-20.

    Attributes:
        single: bound for any one client.
        mean: bound for the mean over all clients, in which their independent noises partly cancel.
    """

    single: float
    mean: float


@serializable
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlState:
    """A control variate, and the known facts about the clients' own ones.

    Attributes:
        vector: c [d], float64; empty before the first round.
        replied: names of the clients that have replied.
        restarts: number of times that a client came back without its own vector, by name.
    """

    vector: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float64))
    replied: tuple[str, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)

    def at(self, size: int) -> np.ndarray:
        """Return c [size], float64: zeros before the first round."""
        return self.vector if self.vector.size == size else np.zeros(size, np.float64)

    @property
    def incidents(self) -> tuple[str, ...]:
        """The incident that clients came back without their control variate; empty if none did."""
        if not self.restarts:
            return ()
        names = list(self.restarts)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        times = sum(self.restarts.values())
        return (
            f"{times} times a client came back without its control variate and started at zero "
            f"({', '.join(names[:_LISTED])}{more})",
        )


@dataclass(frozen=True, slots=True)
class ControlVariate:
    """The server's control variate c: the mean of all clients' c_i, each zero before the client's first reply.

    It is computed from the messages alone. Each client of a round changes its c_i by -c - Dx_i / (E eta). So c changes by the sum
    of these changes over N, without a second message.

    A client that rejoins without its c_i starts at zero again, while its earlier contributions stay in c. Then c has an error of
    these contributions over N, and corrections are a little less accurate. Privacy does not depend on it.

    A lying client changes c by up to twice what an honest one may send, in every round, and honest clients keep the effect. So
    after each round the server shortens c to what honest clients can reach: their c_i are noised mean clipped gradients.

    Attributes:
        quantization_levels: levels above 0 of the messages; None: float32.
    """

    quantization_levels: int | None

    def vector(self, state: ControlState, size: int) -> np.ndarray:
        """Return c [size], float32, as it is sent.

        Raises:
            ValueError: if the messages have so few levels that their errors would grow from round to round.
        """
        if self.quantization_levels is not None and compression.qsgd_variance(size, self.quantization_levels) >= 1:
            least = math.isqrt(size) + 1
            raise checks.refusal(
                "quantization_levels",
                self.quantization_levels,
                "a message's error is part of the next one's control variate, and "
                f"grows there unless its variance bound is below 1; must be at least {least} for {size} parameters, or None",
            )
        return state.at(size).astype(np.float32)

    def next_model(
        self, state: ControlState, collected: CollectedReplies, *, divisor: float, num_clients: int, honest: Honest
    ) -> ControlState:
        """Return the state with c updated by the messages of a round; an update is `divisor` = E eta times a mean gradient.

        With `honest` clients alone c is not shortened, unless messages have few levels or clients lost their c_i.
        """
        size = collected.total.size
        vector = state.at(size)
        sent = vector.astype(np.float32).astype(np.float64)  # the c that clients have received
        vector = vector + (-len(collected.clients) * sent - collected.total / divisor) / num_clients
        norm, most = float(l2_norms(vector)), self._radius(size, honest)
        if norm > most:
            vector *= most / norm
        known, restarts = set(state.replied), dict(state.restarts)
        lost = [name for name in collected.fresh if name in known]
        for name in lost:
            restarts[name] = restarts.get(name, 0) + 1
        if lost:
            log.warning("Control variates were lost and start at zero: %s", ", ".join(lost[:_LISTED]))
        new = [name for name in collected.clients if name not in known]
        return ControlState(vector=vector, replied=(*state.replied, *new), restarts=restarts)

    def longest(self, sum_norm: float, sent: np.ndarray, *, honest: Honest) -> float:
        """Return the largest norm of a noised mean gradient g + c - c_i, given that of g; c_i is such a g of another round.

        Args:
            sum_norm: norm of g.
            sent: the c that clients have received [size].
            honest: see `Honest`.
        """
        size = sent.size
        if self.quantization_levels is None:
            return 2 * sum_norm + float(l2_norms(sent.astype(np.float64)))
        # c_i also has the error of its message, at most sqrt(q) times the norm of the quantized vector, and so on recursively.
        return (2 * sum_norm + self._radius(size, honest)) / (1 - self._error(size))

    def longest_ever(self, size: int, honest: Honest) -> tuple[float, float]:
        """Return the largest norm of an honest g + c - c_i in any round, and that of c."""
        radius = self._radius(size, honest)
        return (2 * honest.single + radius) / (1 - self._error(size)), radius

    def _radius(self, size: int, honest: Honest) -> float:
        """Return the largest norm of c: of the mean of honest gradients, and of the errors of their messages."""
        error = self._error(size)
        return (honest.mean + 2 * error * honest.single) / (1 - error)

    def _error(self, size: int) -> float:
        """Return the largest norm of a message's error, as a fraction of the message's norm."""
        return 0.0 if self.quantization_levels is None else math.sqrt(compression.qsgd_variance(size, self.quantization_levels))
