"""The quick bound of the worst client is never below any client's own cost, and takes few accounts however many clients there are."""

from typing import Any

import pytest

from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, Sampler
from flower_dp.privacy import accounting
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, update_terms
from flower_dp.privacy.dp_pasgd import step_terms
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.privacy.worst_client import MaxClientEpsilon
from tests.charges import device_terms

REPLACE = "replace-one"
DELTA = 1e-4


def terms(noise: Any, sampler: Sampler, *, size: int = 100, num_replies: int = 50, **words: Any) -> ClientTerms:
    return device_terms(num_replies, noise, sampler=sampler, num_units=size, **words)


def own_cost(own: ClientTerms, replies: int, delta: float = DELTA) -> float:
    return accounting.epsilon(accounting.repeated(own.event, replies), delta=delta, relation=REPLACE).epsilon


def gaussian(multiplier: float) -> Gaussian:
    return Gaussian(noise_multiplier=multiplier)


POISSON = {f"p{index}": terms(gaussian(3.0 + index), PoissonSampling(sampling_rate=0.04 * (index + 1))) for index in range(6)}
FIXED = {f"f{index}": terms(gaussian(9.0 - index), FixedSizeSampling(cohort_size=3 + 4 * index)) for index in range(6)}
WHOLE = {f"w{index}": terms(gaussian(20.0 + 7 * index), FullSampling(), num_releases=1 + index % 2) for index in range(6)}
NOISY = {f"l{index}": terms(Laplace(noise_multiplier=40.0 + index), FullSampling()) for index in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "population",
    [POISSON, FIXED, WHOLE, NOISY, POISSON | FIXED | WHOLE | NOISY],
    ids=["poisson", "fixed", "whole", "laplace", "all"],
)
def test_the_bound_is_never_below_any_clients_own_cost_and_never_falls(population: dict[str, ClientTerms]) -> None:
    worst = MaxClientEpsilon(population, relation=REPLACE, delta=DELTA)
    last = 0.0
    for server_round in (1, 9, 10, 23):
        # Not all reply equally often.
        replies = {name: server_round * (index % 3 + 1) // 2 for index, name in enumerate(population)}
        bound = worst.epsilon(replies, {})
        assert bound >= max(own_cost(own, replies[name]) for name, own in population.items() if replies[name])
        assert bound >= last
        last = bound


def test_a_thousand_unequal_clients_take_four_accounts_at_most(monkeypatch):
    population = {
        f"c{size}": terms(gaussian(2.0 + 100 / size), PoissonSampling(sampling_rate=20 / size), size=size, epsilon=8.0)
        for size in range(100, 1100)
    }
    worst = MaxClientEpsilon(population, relation=REPLACE, delta=DELTA)
    calls, account = [], accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *given, **words: calls.append(given) or account(*given, **words))
    for replies, most in ((1, 4), (1, 4), (30, 8), (31, 12), (32, 12), (33, 12), (34, 16), (36, 16)):
        worst.epsilon(dict.fromkeys(population, replies), {})
        assert len(calls) <= most


def test_a_budget_bounds_its_planned_replies_and_no_more() -> None:
    own = terms(gaussian(2.0), FullSampling(), num_replies=3, epsilon=1e-3)  # not true: so that one sees where it is used
    worst = MaxClientEpsilon({"a": own}, relation=REPLACE, delta=DELTA)
    assert worst.epsilon({"a": 3}, {}) == 1e-3
    assert worst.epsilon({"a": 4}, {}) == pytest.approx(own_cost(own, 4), rel=1e-3)


def test_what_else_was_released_adds_up_client_by_client() -> None:
    worst = MaxClientEpsilon(POISSON, relation=REPLACE, delta=DELTA)
    replies = dict.fromkeys(POISSON, 4) | {"p0": 0}
    alone = worst.epsilon(replies, {})
    assert worst.epsilon(replies, {"p0": 0.5}) == pytest.approx(max(alone, 0.5))
    assert worst.epsilon(replies, {"p5": 0.25}) == pytest.approx(alone + 0.25)


@pytest.mark.slow
def test_the_budgets_of_all_methods_terms_hold() -> None:
    paq = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step")
    pasgd: dict[str, Any] = {"epsilon": 3.0, "delta": DELTA, "num_steps": 12, "num_local_steps": 3, "clip_norm": 1.0}
    pasgd |= {"batch_size": 6, "num_records": 24}
    sgd: dict[str, Any] = {"clip_norm": 1.0, "epsilon": 3.0, "num_replies": 3, "num_records": 100}
    for own, delta in (
        (update_terms(steps=paq, epsilon=3.0, delta=DELTA, num_replies=3, num_records=100), DELTA),
        (step_terms(**pasgd), DELTA),
        (step_terms(**pasgd, calibration="zcdp"), DELTA),
        (step_terms(**pasgd, batch_sampling="poisson"), DELTA),
        (gradient_terms(**sgd, mechanism="gaussian", delta=DELTA), DELTA),
        (gradient_terms(**sgd, mechanism="gaussian", delta=DELTA, sampling_rate=0.2), DELTA),
        (gradient_terms(**sgd, mechanism="laplace", delta=0.0), 0.0),
    ):
        assert own.epsilon == 3.0
        assert own_cost(own, own.num_replies, delta) <= 3.0
