"""The last step before a client's metrics leave it: contributions, noise, and nothing in between."""

import numpy as np
import pytest

from flower_dp.clients.local.row import ExactMean
from flower_dp.core import noise
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from tests.local_grids import private_row

TRAINING = gradient_terms(mechanism="laplace", clip_norm=1.0, epsilon=1.0, delta=0.0, num_replies=5, num_records=4)
RELEASE = EvaluationBudget(epsilon=1.0, num_evaluations=1).terms("a", TRAINING).release


def test_a_contribution_beyond_the_bound_is_refused():
    rng = np.random.default_rng(0)
    private_row(np.array([[0.5, -0.5], [1.0, 0.0]]), RELEASE, rng)
    with pytest.raises(ValueError, match="L1 norm is above 1"):
        private_row(np.array([[0.5, -0.5], [0.75, 0.5]]), RELEASE, rng)


def test_what_leaves_lies_on_the_lattice_of_the_noise():
    contributions = np.full((4, 3), 1 / 3)
    row = private_row(contributions, RELEASE, np.random.default_rng(0))
    step = RELEASE.lattice_step(3) / 2**12
    assert step <= RELEASE.noise_scale / 1024
    assert np.array_equal(noise.round_to_nearest(row * 4, step), row * 4)


def test_a_sum_that_is_not_exact_does_not_leave():
    """2^54 steps have no float64 each; nothing says what the rounded last bits tell."""
    step = RELEASE.lattice_step(1) / 2**12
    mean = ExactMean(num_contributions=4.0, step=step)
    assert mean(np.array([2.0**52 * step])).tolist() == [2.0**50 * step]
    for total in (2.0**54 * step, -(2.0**53) * step, np.nan):
        with pytest.raises(ValueError, match="too large to be exact"):
            mean(np.array([total]))
