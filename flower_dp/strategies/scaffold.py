"""SCAFFOLD (Karimireddy et al. 2020): control variates for clients with different data, with and without privacy."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np

from flower_dp.core import compression
from flower_dp.core.clipping import l2_norms
from flower_dp.core.sampling import Sampler
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies.control import ControlState, Honest
from flower_dp.strategies.dp_fedpaq import DPFedPAQRules
from flower_dp.strategies.releases.books import PerClient, Population
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.rules import Options
from flower_dp.strategies.strategy import DPStrategy

log = logging.getLogger("flwr")

_LISTED = 5


class ControlVariate:
    """The server's control variate c: the mean of all clients' c_i, each zero before the client's first reply.

    It is computed from the messages alone. The clients of a round change their c_i by -c - Dx_i / (E eta) each, so c changes
    by the sum of that over N, and no second message is needed. A client that rejoins without its c_i starts at zero again, while
    its earlier contributions stay in c. Then c has an error of these contributions over N, and corrections are a little less
    accurate. Privacy does not depend on it.

    A client that lies changes c by up to twice what an honest one may send, in every round, and honest ones carry it on. So c is
    shortened after each round to what honest clients can make: their c_i are noised mean clipped gradients.

    Args:
        quantization_levels: of the messages; None: float32.
    """

    def __init__(self, quantization_levels: int | None) -> None:
        self._levels = quantization_levels
        self.state = ControlState()

    def vector(self, size: int) -> np.ndarray:
        """Return c [size], float32.

        Raises:
            ValueError: if the messages have so few levels that their errors grow from round to round.
        """
        if self._levels is not None and compression.qsgd_variance(size, self._levels) >= 1:
            least = math.isqrt(size) + 1
            raise ValueError(
                f"quantization_levels={self._levels}: a message's error is part of the next one's control variate, and grows "
                "there "
                f"unless its variance bound is below 1; must be at least {least} for {size} parameters, or None"
            )
        return self._vector(size).astype(np.float32)

    def _vector(self, size: int) -> np.ndarray:
        """Return c [size], float64: zeros before the first round."""
        return self.state.vector if self.state.vector.size == size else np.zeros(size, np.float64)

    def learn(self, collected: Collected, *, divisor: float, num_clients: int, honest: Honest) -> None:
        """Update c by the messages of a round; an update is `divisor` = E eta times a mean gradient.

        With `honest` clients alone c is not changed further, but with few levels or clients that lost their c_i it may be.
        """
        size = collected.total.size
        vector = self._vector(size)
        sent = vector.astype(np.float32).astype(np.float64)  # the c that clients have received
        vector = vector + (-len(collected.clients) * sent - collected.total / divisor) / num_clients
        norm, most = float(l2_norms(vector)), self._radius(size, honest)
        if norm > most:
            vector *= most / norm
        known, restarts = set(self.state.replied), dict(self.state.restarts)
        lost = [name for name in collected.fresh if name in known]
        for name in lost:
            restarts[name] = restarts.get(name, 0) + 1
        if lost:
            log.warning("control variates lost, they start at zero: %s", ", ".join(lost[:_LISTED]))
        new = [name for name in collected.clients if name not in known]
        self.state = ControlState(vector=vector, replied=(*self.state.replied, *new), restarts=restarts)

    def longest(self, sum_norm: float, size: int, *, honest: Honest) -> float:
        """Return the largest norm of a noised mean gradient g + c - c_i, given that of g; c_i is such a g of another round."""
        if self._levels is None:
            return 2 * sum_norm + float(l2_norms(self._vector(size)))
        # c_i also has the error of its message, at most sqrt(q) times the norm of the quantised vector, and so on recursively.
        return (2 * sum_norm + self._radius(size, honest)) / (1 - self._error(size))

    def _radius(self, size: int, honest: Honest) -> float:
        """Return the largest norm of c: of the mean of honest gradients, and of the errors of their messages."""
        if self._levels is None:
            return honest.mean
        error = self._error(size)
        return (honest.mean + 2 * error * honest.single) / (1 - error)

    def _error(self, size: int) -> float:
        """The norm of a message's error, as a part of the message's."""
        return 0.0 if self._levels is None else math.sqrt(compression.qsgd_variance(size, self._levels))

    @property
    def incidents(self) -> tuple[str, ...]:
        """How many clients came back without their control variate, in words."""
        if not self.state.restarts:
            return ()
        names = list(self.state.restarts)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        times = sum(self.state.restarts.values())
        return (
            f"{times} times a client came back without its control variate and started at zero "
            f"({', '.join(names[:_LISTED])}{more})",
        )


class Scaffold(DPStrategy):
    """SCAFFOLD, for clients whose recipe is `flower_dp.clients.ScaffoldRecipe` with the same numbers.

    Local steps go along g + c - c_i: c_i is the client's own estimate of its mean gradient, c the mean of all clients'. If
    clients have different data, plain local steps drift to each client's own optimum; corrected steps do not. The rest is
    `DPFedPAQ`: E steps a round on b records each without replacement, clipping record by record, noise by each client's own
    budget, messages that are private one by one. The server sends c with the model; clients send only the update.

    The guarantee is exactly that of DP-FedPAQ: c and c_i are computed from messages that were private when they were sent, so
    they cost nothing, and every reply is charged once. `epsilon=math.inf` with a clip norm that no gradient reaches is SCAFFOLD
    without privacy.

    Args:
        steps: as for `DPFedPAQ`, and all others.
        sampling: who takes part in a round.
        num_clients: number of clients.
        num_records: public data sizes.
        epsilon: budget of each client; math.inf: no noise, not private.
        delta: of every budget.
        quantization_levels: more than sqrt(d), or None: with fewer the errors of control variates grow from round to round.
        num_replies: the most replies of a client.
        options: those of every strategy: see `Options`.

    Raises:
        ValueError: for a value that makes no sense, naming field and value.

    Example:
        >>> import math
        >>> from flower_dp.core.sampling import FixedSizeSampling
        >>> from flower_dp.privacy.dp_fedpaq import FedPAQSteps
        >>> from flower_dp.strategies import Scaffold
        >>> steps = FedPAQSteps(learning_rate=0.1, num_local_steps=5, batch_size=10, clip_norm=1e4, sensitivity="per-step")
        >>> sampling = FixedSizeSampling(cohort_size=10)
        >>> strategy = Scaffold(
        ...     steps=steps, sampling=sampling, num_clients=100, num_records=600, epsilon=math.inf, delta=1e-5, num_replies=50
        ... )
        >>> strategy.rules.training.name
        'scaffold'
    """

    rules: DPFedPAQRules

    def __init__(
        self,
        *,
        steps: FedPAQSteps,
        sampling: Sampler,
        num_clients: int,
        num_records: int | Sequence[int] | Mapping[str, int],
        epsilon: float | PerClient,
        delta: float,
        quantization_levels: int | None = None,
        num_replies: int | Sequence[int] | Mapping[str, int] | None = None,
        **options: Unpack[Options],
    ) -> None:
        population = Population(num_clients=num_clients, num_records=num_records, num_replies=num_replies, epsilon=epsilon)
        rules = DPFedPAQRules(
            population,
            steps,
            sampling,
            delta=delta,
            quantization_levels=quantization_levels,
            name="scaffold",
            title="SCAFFOLD",
            control=ControlVariate(quantization_levels),
        )
        super().__init__(rules, **options)
