"""One client's metrics as what leaves it in a private evaluation: a clipped vector with its share of the noise. NumPy only."""

from collections.abc import Callable, Mapping

import numpy as np

from flower_dp.core import noise
from flower_dp.core.clipping import clip_l2
from flower_dp.core.noise import Generator
from flower_dp.wire import EvaluationOrder, Instruction
from flower_dp.wire.evaluation import FINER_LATTICE


def protected_vector(
    metrics: Mapping[str, float], *, instruction: Instruction, order: EvaluationOrder, secret: Callable[[], Generator]
) -> np.ndarray:
    """Return one client's vector [dimension], float64: clipped, on the lattice of the round, with its share of the noise.

    Whatever the metrics are, its norm before the noise is at most 1; nothing stands between the clip and the noise.

    Args:
        metrics: of the global model on the client's records.
        instruction: of the round.
        order: its table.
        secret: gives the generator of the noise.

    Raises:
        ValueError: if a metric that is asked for is not there.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.metric_vector import protected_vector
        >>> from flower_dp.wire import EVALUATION, EvaluationOrder, Instruction
        >>> order = {"placement": "central", "noise_std": 0.0, "bounds": {"accuracy": 1.0}}
        >>> words = {"server_round": 1, "method": EVALUATION, "clients": ("a",), "clip_norm": 1.0, "noise_multiplier": 4.0}
        >>> instruction = Instruction(**words, order=order)
        >>> vector = protected_vector(
        ...     {"accuracy": 0.5, "f1": 0.7},
        ...     instruction=instruction,
        ...     order=EvaluationOrder.of(instruction),
        ...     secret=np.random.default_rng,
        ... )
        >>> vector.round(2).tolist()  # the server adds the noise
        [0.35, 0.71]
    """
    vector = order.vector(metrics)
    scale = order.noise_std or instruction.noise_multiplier * instruction.clip_norm
    step = noise.lattice_step(scale, clip_norm=instruction.clip_norm, dimension=order.dimension) / FINER_LATTICE
    clipped = noise.toward_zero(np.asarray(clip_l2(vector, instruction.clip_norm), np.float64), step)
    if not order.noise_std:
        return np.asarray(clipped)
    return np.asarray(clipped + noise.gaussian(clipped, order.noise_std, step, secret()))
