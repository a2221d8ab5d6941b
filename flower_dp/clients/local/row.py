"""What leaves a client in an evaluation that is private on its own: a mean of contributions with full noise. NumPy only."""

import numpy as np

from flower_dp.core import noise
from flower_dp.core.noise import Generator
from flower_dp.privacy.release import Release
from flower_dp.wire.evaluation import FINER_LATTICE


def private_row(contributions: np.ndarray, release: Release, rng: Generator) -> np.ndarray:
    """Return the noised sum of contributions over their public number [dimension], float64.

    Every contribution is rounded toward zero to the lattice of the noise, so that the sum is exact. A sum that is noised has
    nothing between its contributions' bound and the noise; the division is by a public number.

    Args:
        contributions: [n, dimension], each of L1 norm at most 1; an unit of privacy has one.
        release: of the client's own terms of evaluation.
        rng: secret.

    Raises:
        ValueError: if a contribution is longer, or the sum is not exact.

    Example:
        >>> import numpy as np
        >>> from flower_dp.clients.local.row import private_row
        >>> from flower_dp.privacy.evaluation_budget import EvaluationBudget
        >>> from flower_dp.privacy.fedsgd_dpc import gradient_terms
        >>> training = gradient_terms(
        ...     mechanism="laplace", clip_norm=1.0, epsilon=1.0, delta=0.0, num_replies=5, num_records=1000
        ... )
        >>> terms = EvaluationBudget(epsilon=1e6, num_evaluations=1).terms("a", training)  # next to no noise
        >>> private_row(np.full((1000, 2), 0.25), terms.release, np.random.default_rng(0)).round(3).tolist()
        [0.25, 0.25]
    """
    dimension = contributions.shape[1]
    if np.any(np.abs(contributions).sum(axis=1) > release.clip_norm * (1 + 1e-9)):
        raise ValueError("a contribution has an L1 norm above 1")
    step = release.lattice_step(dimension) / FINER_LATTICE
    total = np.asarray(noise.toward_zero(contributions, step)).sum(axis=0)
    noised = total + release.mechanism.noise(total, release.noise_scale, step, rng)
    if not noise.exact(noised, step):
        raise ValueError("the sum is too large to be exact")
    return np.asarray(noised / release.expected_cohort)
