"""Audits of whole runs with correlated noise, the worst pattern of participations; planted bugs are found."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from flower_dp.audit import CASES, audit
from flower_dp.audit.case import TrialRunner
from flower_dp.audit.methods import correlated
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.strategy_matrix import BandedMatrix
from flower_dp.strategies import DPFTRL
from flower_dp.strategies.releases.correlated_noise import CorrelatedSharing, SeparatedSum
from flower_dp.strategies.releases.noised_sum import SumState
from flower_dp.strategies.releases.participation_state import ParticipationState

BANDED = "dp-ftrl, banded"
CONFIDENCE = 0.99
# Fewer where a bug makes the noise much worse: mu grows by a factor of 1.35 where it is least.
TRIALS = {"redrawn": 1200, "half": 700, "uncounted": 700, "one_participation": 700}


def reset(patch):
    """The noise of every round is drawn from the run's beginning: that of round 1 again."""
    row = ParticipationState.row

    def again(self, matrix, number, length, rng):
        first = replace(self, seeds=(), checksum=0, buffers=None)
        made, after = row(
            first, matrix, 1, length, SimpleNamespace(bytes=lambda _: bytes.fromhex(self.seeds[0])) if self.seeds else rng
        )
        return made, replace(after, seeds=self.seeds or after.seeds)

    patch.setattr(ParticipationState, "row", again)


def redrawn(patch):
    """A resumed run repeats round 1 with other noise; who took part is forgotten."""
    ask, row = SeparatedSum.ask, ParticipationState.row

    def asks(self, state, size, names, rng):
        return ask(self, state.with_release(self.name, SumState()), size, names, rng)

    patch.setattr(SeparatedSum, "ask", asks)
    patch.setattr(SeparatedSum, "cohort", lambda self, state, names, rng: (np.arange(len(names)), self.state_in(state)))
    patch.setattr(ParticipationState, "row", lambda self, matrix, number, length, rng: row(self, matrix, 1, length, rng))


def forgotten(patch):
    """A resumed run has forgotten who took part; its noise continues."""
    asked = ParticipationState.asked
    patch.setattr(ParticipationState, "asked", lambda self, names, number: {} if number == 1 else asked(self, names, number))


def too_early(patch):
    refusal = MinimumSeparationSampling.refusal
    patch.setattr(MinimumSeparationSampling, "refusal", lambda self, past, number: refusal(self, past, number + 1))


def uncounted(patch):
    """A second participation counts as the first one does; the separation is that of all rounds, so that only the count limits it."""
    participations = MinimumSeparationSampling.participations
    patch.setattr(MinimumSeparationSampling, "participations", lambda self, num_rounds: participations(self, num_rounds) - 1)


def half(patch):
    begin = CorrelatedSharing.begin

    def halved(self, state, number, length, rng):
        row, after = begin(self, state, number, length, rng)
        return row * 0.7, after

    patch.setattr(CorrelatedSharing, "begin", halved)


def one_participation(patch):
    patch.setattr(BandedMatrix, "sensitivity", lambda self, schema: float(np.linalg.norm(self.bands)))


BUGS = [reset, redrawn, forgotten, too_early, uncounted, half, one_participation]


@pytest.mark.slow
def test_an_honest_run_keeps_its_claim_and_comes_near_to_it():
    """tests/audit/test_cases.py has the other kinds of noise."""
    found = audit(CASES[BANDED], trials=300, confidence=CONFIDENCE)
    assert not found.violation
    assert found.could_refute
    assert found.ratio > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    """Stock clients: this package's own would refuse to take part too early. The noise of the case follows from the sensitivity."""
    rounds = 3 if bug in (uncounted, one_participation) else 2
    bug(monkeypatch)
    case = correlated(bug.__name__, noise="banded", bands=2, rounds=rounds, stock=True)
    assert audit(case, trials=TRIALS.get(bug.__name__, 320), confidence=CONFIDENCE).violation


def test_the_unit_takes_part_in_the_worst_pattern():
    runner = TrialRunner(CASES[BANDED])
    runner.run(present=True)
    past = runner.strategy.state.secret["dp-ftrl"].past
    assert {name: (one.last, one.count) for name, one in past.items()} == {"c0": (3, 2), "c1": (3, 2)}
    weights = runner._weights((1.0, 0.0, 1.0, 0.0))
    c = runner.strategy.rules.training.noise.matrix.bands[1]
    matrix = np.eye(4) + c * np.eye(4, k=-1)
    np.testing.assert_allclose(weights, matrix.T @ matrix @ np.array([1.0, 0, 1, 0]), atol=1e-9)


def test_the_case_of_a_run_has_the_noise_of_the_run():
    words = {"num_clients": 20, "cohort_size": 2, "num_rounds": 8, "min_separation": 0, "max_participations": 0, "sampling": ""}
    of_run = DPFTRL(
        clip_norm=1.0,
        epsilon=4.0,
        num_rounds=8,
        sampling=MinimumSeparationSampling(cohort_size=2, min_separation=8),
        num_clients=20,
        delta=20**-1.1,
    )
    for given, expected in (
        ({"epsilon": 4.0, "noise_multiplier": 2.0}, of_run.rules.noise.promised_multiplier),
        ({"epsilon": 0.0, "noise_multiplier": 2.0}, 2.0 / of_run.rules.noise.run_sensitivity),
    ):
        case = correlated("a run", clip_norm=1.0, delta=0.0, **words, **given)
        assert case.strategy().rules.noise.promised_multiplier == pytest.approx(expected)
    with pytest.raises(ValueError, match="a run: is not private"):
        correlated("a run", clip_norm=1.0, delta=0.0, **words, epsilon=0.0, noise_multiplier=0.0)
