"""A release as one object: what it asks follows from it, and the limits of replies from what was asked."""

import math
from typing import Any

import numpy as np
import pytest

from flower_dp.core.compression import qsgd_norm_ratio
from flower_dp.core.metric_bounds import FINER_LATTICE, MetricBounds
from flower_dp.core.noise import check_lattice, lattice_step
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSMP
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.local_releases import LocalReleases
from flower_dp.strategies.releases.noised_sum import NoisedSum
from tests.asks import replace
from tests.limits import accepted
from tests.releases import ask, noised, round_of

WORDS: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 2.0, "sampling": FullSampling(), "num_clients": 16, "delta": 1e-3}

NAMES = tuple(f"c{place}" for place in range(16))


def sum_of(strategy: Any) -> NoisedSum:
    made = strategy.rules.training
    assert isinstance(made, NoisedSum)
    return made


@pytest.mark.parametrize("size", [1, 10**6])
def test_the_lattice_that_is_asked_is_that_of_the_smallest_noise_that_one_party_adds(size: int) -> None:
    """Under central placement the server's, of std 1; under distributed placement a share, of std 1 / sqrt(16)."""
    central, distributed = (ask(sum_of(DPFedSAM(**WORDS, placement=one)), size, NAMES) for one in ("central", "distributed"))
    assert (central.noise_std, distributed.noise_std) == (0.0, 0.25)
    assert central.step == lattice_step(1.0, clip_norm=0.5, dimension=size)
    assert distributed.step == lattice_step(0.25, clip_norm=0.5, dimension=size)
    check_lattice(distributed.step, scale=distributed.noise_std, clip_norm=0.5)
    assert (central.promise.clip_norm, central.promise.noise_multiplier) == (0.5, 2.0)
    assert central.promise == distributed.promise
    # With one coordinate the share alone decides; a lattice of the whole noise would be too coarse for it.
    assert size > 1 or distributed.step < lattice_step(1.0, clip_norm=1e9, dimension=1)


def test_the_lattice_of_an_evaluation_is_finer() -> None:
    made = replace(sum_of(DPFedAvg(**WORDS | {"clip_norm": 1.0})), metrics=MetricBounds(bounds={"loss": 4.0}))
    asked = ask(made, 2, NAMES)
    assert asked.step == lattice_step(2.0, clip_norm=1.0, dimension=2) / FINER_LATTICE
    assert asked.metrics == made.metrics


@pytest.mark.parametrize("trusted", [True, False])
def test_the_share_that_is_asked_follows_a_public_number_where_the_cohort_is_secret(trusted: bool) -> None:
    arguments = WORDS | {"sampling": PoissonSampling(sampling_rate=0.5)}
    made = sum_of(DPFedSAM(**arguments, server_completes_noise=trusted))
    answer = {(ask(made, 9, NAMES[:size]).noise_std, ask(made, 9, NAMES[:size]).step) for size in range(1, 17)}
    assert (len(answer) == 1) == trusted
    if not trusted:  # 75 % of those that are asked must answer
        assert ask(made, 9, NAMES[:8]).noise_std == pytest.approx(1.0 / math.sqrt(6))


def test_limits_and_noise_lie_on_the_mask_of_their_own_ask() -> None:
    made = sum_of(FedSMP(**WORDS, keep_ratio=0.25, placement="central"))
    first, second = ask(made, 1000, NAMES), ask(made, 1000, NAMES)
    assert first.mask != second.mask
    assert first.step == lattice_step(1.0, clip_norm=0.5, dimension=250)
    for asked in (first, second, first):  # whichever was asked last
        assert asked.mask is not None
        kept, mask = asked.mask.indices(1000), made.limits(round_of(asked, 1000)).mask
        assert mask is not None
        np.testing.assert_array_equal(mask, kept)
        row = accepted(made.limits(round_of(asked, 1000)), np.ones(1000), ["a"])
        assert set(np.flatnonzero(row)) == set(kept)
        mean, _ = noised(made, asked, np.zeros(1000), NAMES)
        assert set(np.flatnonzero(mean)) <= set(kept)
        assert np.count_nonzero(mean) > 200


def test_limits_follow_from_the_ask_that_was_sent_whatever_the_rules_say_since() -> None:
    """A clip norm that moves: replies to what was asked before are held to that."""
    made = sum_of(DPFedAvg(**WORDS))
    asked = ask(made, 4, NAMES)
    later = sum_of(DPFedAvg(**WORDS | {"clip_norm": 50.0}))
    row = np.array([30.0, 40.0, 0.0, 0.0])
    assert np.linalg.norm(accepted(made.limits(round_of(asked, 4)), row, ["a"])) <= 0.5
    assert np.linalg.norm(accepted(later.limits(round_of(asked, 4)), row, ["a"])) <= 0.5
    assert np.linalg.norm(accepted(later.limits(round_of(asked, 4)), row, ["a", "b"])) <= 1.0
    assert np.linalg.norm(accepted(later.limits(round_of(ask(later, 4, NAMES), 4)), row, ["a"])) == pytest.approx(50.0, rel=0.01)
    limits = later.limits(round_of(asked, 4))
    assert (limits.clip_norm, limits.step) == (0.5, asked.step)
    # And a sum that is not exact on the lattice that was asked is not released.
    with pytest.raises(RoundDiscarded, match="too large to be exact"):
        noised(later, asked, np.full(4, asked.step * 2.0**54), NAMES)


def test_where_clients_add_noise_the_longest_honest_sum_follows_from_the_share_that_was_asked() -> None:
    made = sum_of(DPFedSAM(**WORDS))
    asked = ask(made, 100, NAMES)
    other = sum_of(DPFedSAM(**WORDS | {"noise_multiplier": 2000.0}))
    limits = other.limits(round_of(asked, 100))
    assert limits.clip_norm is None
    # C + share (sqrt(100) + 10) for one; 4 C + 2 share (sqrt(100) + 10) for four, by hand.
    assert limits.honest_norm(["a"]) == pytest.approx(0.5 + 0.25 * 20)
    assert limits.honest_norm(["a", "b", "c", "d"]) == pytest.approx(4 * 0.5 + 2 * 0.25 * 20)
    with pytest.raises(ValueError, match="more than 2 times that of any honest one"):
        accepted(limits, np.full(100, 1.2), ["a"])
    assert accepted(limits, np.full(100, 1.0), ["a"]).tolist() == [1.0] * 100
    lossy = replace(asked, quantization_levels=3)
    assert other.limits(round_of(lossy, 100)).honest_norm(["a", "b"]) == pytest.approx(2 * 5.5 * qsgd_norm_ratio(100, 3))


def test_what_clients_select_is_asked_where_they_add_the_noise_alone() -> None:
    """Before the server's noise nothing is chosen by size."""
    central, distributed = (
        ask(sum_of(DPFedSAM(**WORDS, keep_ratio=0.3, placement=one)), 100, NAMES) for one in ("central", "distributed")
    )
    assert (central.keep_ratio, distributed.keep_ratio) == (1.0, 0.3)


def own_replies(terms: dict[str, ClientTerms], **arguments: Any) -> LocalReleases:
    words: dict[str, Any] = {"name": "fedsgd-dpc", "clip_norm": 0.5, "sampling": FullSampling(), "relation": "replace-one"}
    words |= {"weight_of": lambda name: 1.0, "longest": lambda now: lambda name: 1.0, "terms": terms}
    return LocalReleases(**words | arguments)


def test_own_replies_are_asked_by_the_terms_of_each() -> None:
    """And promised is the least noise of them."""
    budget = EvaluationBudget(epsilon=1.0, num_evaluations=1)
    words: dict[str, Any] = {"mechanism": "laplace", "clip_norm": 0.5, "delta": 0.0, "num_replies": 3, "num_records": 8}
    training = {
        name: gradient_terms(**words, epsilon=epsilon, relation="replace-one") for name, epsilon in (("a", 1.0), ("b", 3.0))
    }
    made = own_replies(training, weight_of={"a": 0.25, "b": 0.75}.__getitem__)
    asked = ask(made, 7, ("a", "b"))
    own = {name: terms.release.mechanism.noise_multiplier for name, terms in training.items()}
    assert own["a"] > own["b"]
    assert (asked.placement, asked.step, asked.noise_std, asked.mask, asked.metrics) == ("local", 0.0, 0.0, None, None)
    assert (asked.promise.clip_norm, asked.promise.noise_multiplier) == (0.5, own["b"])
    assert {name: (one.weight, one.terms, one.noise_multiplier) for name, one in asked.own.items()} == {
        name: (weight, training[name].fingerprint, own[name]) for name, weight in (("a", 0.25), ("b", 0.75))
    }
    evaluations = {name: budget.terms(name, terms) for name, terms in training.items()}
    bounds = MetricBounds(bounds={"loss": 4.0})
    assert ask(own_replies(evaluations, clip_norm=1.0, metrics=bounds), 1, ("a", "b")).metrics == bounds
    assert ask(made, 7, ()).promise.noise_multiplier == 0
