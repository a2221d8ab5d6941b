"""Epsilon in, noise out: the statement after all rounds is within 1 % below the epsilon that was given, and never above."""

import itertools
import math

import numpy as np
import pytest

from flower_dp.clients import NbAFLTerms
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.strategies import (
    AdaptiveClip,
    DPFedAvg,
    DPFedSAM,
    FedSMP,
    NbAFL,
    PrivateEvaluation,
)
from flower_dp.strategies.forecast import forecast
from tests.adversaries.fuzzing import THOROUGH
from tests.charges import charge
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

CLIENTS, ROUNDS = 40, 6
NAMES = tuple(f"c{number:02}" for number in range(CLIENTS))
COMMON = {"clip_norm": 0.5, "num_clients": CLIENTS, "delta": 1e-3}
SAMPLINGS = {
    "full": FullSampling(),
    "poisson": PoissonSampling(sampling_rate=0.5),
    "fixed size": FixedSizeSampling(cohort_size=10),
    "round robin": RoundRobinSampling(cohort_size=16),
}
METHODS = {
    "central": lambda **arguments: DPFedAvg(**COMMON, **arguments),
    "distributed": lambda **arguments: DPFedSAM(**COMMON, **arguments),
    "untrusted server": lambda **arguments: DPFedSAM(**COMMON, server_completes_noise=False, **arguments),
    "own shares alone": lambda **arguments: DPFedSAM(**COMMON, keep_ratio=0.5, **arguments),
    "masked": lambda **arguments: FedSMP(**COMMON, **arguments),
    "adaptive": lambda **arguments: DPFedAvg(
        **COMMON | {"clip_norm": AdaptiveClip(initial_clip_norm=0.1, min_clip_norm=0.01, max_clip_norm=1.0)}, **arguments
    ),
}


def evaluation(sampling):
    return PrivateEvaluation(noise_multiplier=30.0, sampling=sampling, every=2)


def drawn(strategy, release, rng):
    """The next cohort of a release."""
    chosen, after = release.cohort(strategy.state, NAMES, rng)
    strategy._session.update_state(releases={**strategy.state.releases, release.name: after})
    return [NAMES[place] for place in chosen]


def spent(strategy, num_rounds=ROUNDS):
    """The statement after rounds that are drawn and charged as in a run; none of them is refused."""
    strategy.plan(num_rounds, NAMES)
    rules, rng = strategy.rules, np.random.default_rng(3)
    for number in range(1, num_rounds + 1):
        assert rules.stop_reason(strategy.state, number, None) is None
        cohort = drawn(strategy, rules.training, rng)
        assert rules.stop_reason(strategy.state, number, len(cohort)) is None
        charge(strategy, cohort)
        if rules.evaluation is not None and rules.evaluation.due(strategy.charges, number):
            charge(strategy, drawn(strategy, rules.evaluation, rng), release=rules.evaluation)
    assert strategy.statement.num_charged_rounds == num_rounds
    return strategy.statement


# Every sampling, every kind of noise, and both of them together where shares of noise follow from the cohort.
FEW = [
    ("central", "full", "add-or-remove-one", False),
    ("central", "full", "add-or-remove-one", True),
    ("central", "poisson", "replace-one", True),
    ("central", "round robin", "add-or-remove-one", True),
    ("distributed", "full", "add-or-remove-one", False),
    ("distributed", "fixed size", "replace-one", False),
    ("untrusted server", "full", "replace-one", True),
    ("untrusted server", "poisson", "add-or-remove-one", True),
    ("own shares alone", "round robin", "replace-one", False),
    ("masked", "poisson", "add-or-remove-one", False),
    ("adaptive", "full", "add-or-remove-one", True),
]


def cases():
    for method, sampling, evaluated in itertools.product(METHODS, SAMPLINGS, (False, True)):
        for relation in ("replace-one",) if sampling == "fixed size" else ("add-or-remove-one", "replace-one"):
            if THOROUGH or (method, sampling, relation, evaluated) in FEW:
                marks = () if sampling in ("full", "round robin") else (pytest.mark.slow,)
                name = f"{method}, {sampling}, {relation}{', evaluated' * evaluated}"
                yield pytest.param(method, sampling, relation, evaluated, marks=marks, id=name)


@pytest.mark.parametrize(("method", "sampling", "relation", "evaluated"), list(cases()))
def test_the_statement_ends_within_a_hundredth_below_epsilon(method, sampling, relation, evaluated):
    sampler = SAMPLINGS[sampling]
    plan = evaluation(sampler) if evaluated else None
    target = 1.5
    strategy = METHODS[method](epsilon=target, num_rounds=ROUNDS, sampling=sampler, relation=relation, evaluation=plan)
    statement = spent(strategy)
    least = 0.99
    if method == "untrusted server" and sampling == "poisson":
        least = 0.9  # the cost follows from the cohorts that are drawn, of some 20 clients here
    assert least * target <= statement.epsilon <= target
    assert statement.noise["noise_multiplier"] == strategy.rules.release.mechanism.noise_multiplier
    assert (statement.noise["calibrated_for_epsilon"], statement.noise["calibrated_for_rounds"]) == (target, ROUNDS)
    # Against participants: the larger of the two where they know their own shares.
    assert statement.epsilon == max(one.epsilon for one in statement.adversaries if not one.trusted)


@pytest.mark.parametrize("epsilon", [1e-3, 2000.0])
def test_any_epsilon_can_be_asked_for(epsilon):
    strategy = DPFedAvg(**COMMON, epsilon=epsilon, num_rounds=ROUNDS, sampling=FullSampling())
    assert 0.99 * epsilon <= spent(strategy).epsilon <= epsilon


def test_a_run_of_another_length_is_refused_before_any_client_is_asked():
    strategy = DPFedAvg(**COMMON, epsilon=2.0, num_rounds=5, sampling=FullSampling())
    for number in (3, 6):
        with pytest.raises(
            ValueError, match=rf"num_rounds={number}: the strategy was constructed with num_rounds=5, .*epsilon=2"
        ):
            strategy.start(LocalGrid(stock_app(shifted(float)), CLIENTS), arrays(w=np.zeros(4, np.float32)), num_rounds=number)
    assert strategy.statement.epsilon == 0


def test_a_loop_of_ones_own_never_passes_epsilon():
    strategy = DPFedAvg(**COMMON, epsilon=2.0, num_rounds=5, sampling=FullSampling())
    for number in range(1, 6):
        assert [strategy.rules.stop_reason(strategy.state, number, size) for size in (None, CLIENTS)] == [None, None]
        charge(strategy, NAMES)
    assert strategy.rules.stop_reason(strategy.state, 6, None) == "it would pass target_epsilon=2"


REFUSED = [
    ({}, "noise_multiplier=None, epsilon=None: neither is given; must be exactly one"),
    ({"epsilon": 8.0, "noise_multiplier": 0.9, "num_rounds": 5}, r"noise_multiplier=0\.9, epsilon=8\.0: both are given"),
    ({"epsilon": 8.0}, r"num_rounds: is missing; epsilon=8\.0 needs"),
    ({"epsilon": 8.0, "num_rounds": 5, "target_epsilon": 7.0}, r"target_epsilon=7\.0: epsilon=8\.0 is the run's target"),
    ({"noise_multiplier": 0.9, "num_rounds": 5}, "num_rounds=5: is read with epsilon only"),
    ({"epsilon": math.inf, "num_rounds": 5}, "epsilon=inf: must be a finite number"),
    ({"epsilon": 1e-9, "num_rounds": 5, "delta": 1e-9}, "epsilon=1e-09: no noise multiplier up to 1e6 reaches it at delta=1e-09"),
    (
        {"epsilon": 1.0, "num_rounds": 4, "evaluation": PrivateEvaluation(noise_multiplier=0.0, sampling=FullSampling())},
        "epsilon=1.0: the 4 private evaluations alone cost inf",
    ),
]


@pytest.mark.parametrize(("arguments", "match"), REFUSED)
def test_nonsense_is_refused_naming_fields_and_values(arguments, match):
    with pytest.raises(ValueError, match=match):
        DPFedSAM(**{**COMMON, "sampling": FullSampling(), **arguments})


# Methods whose epsilon is every client's budget

PROVED = {"num_clients": CLIENTS, "num_records": 20, "delta": 1e-3, "clip_norm": 2.0, "epsilon": 3.0, "num_replies": ROUNDS}


def test_nbafl_adds_no_noise_on_the_server_for_a_proved_epsilon_and_broadcasts_cost_no_more():
    strategy = NbAFL(**PROVED)
    strategy.plan(100)
    rules = strategy.rules
    assert rules.downlink_noise_std == 0
    terms = NbAFLTerms(clip_norm=2.0, epsilon=3.0, delta=1e-3, min_records=20, num_records=31, num_replies=ROUNDS).terms()
    assert rules.uplink_noise_std == terms.release.noise_scale
    assert strategy.statement.paper_epsilon is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "epsilon=None, paper_epsilon=None: neither is given"),
        ({"epsilon": 1.0, "paper_epsilon": 2.0, "num_replies": 2}, r"epsilon=1\.0, paper_epsilon=2\.0: both are given"),
        ({"epsilon": 1.0}, "num_replies: is missing"),
        ({"paper_epsilon": 1.0, "num_replies": 2}, "uplink_exposures: is missing"),
        ({"epsilon": 1.0, "num_replies": 2, "uplink_exposures": 2}, "uplink_exposures=2: is read with paper_epsilon only"),
        ({"epsilon": -1.0, "num_replies": 2}, "epsilon=-1"),
        ({"epsilon": 1.0, "num_replies": [1, 2, 3, 4]}, "all clients add the same noise; must be one number"),
    ],
)
def test_nbafl_takes_one_epsilon_and_what_belongs_to_it(arguments, match):
    with pytest.raises(ValueError, match=match):
        NbAFL(num_clients=4, num_records=20, clip_norm=2.0, delta=1e-3, **arguments)


# The statement before the run


@pytest.mark.parametrize(("method", "sampling"), [("central", "round robin"), ("distributed", "full")])
def test_the_forecast_is_the_statement_of_the_run(method, sampling):
    def make():
        sampler = SAMPLINGS[sampling]
        return METHODS[method](noise_multiplier=4.0, sampling=sampler, evaluation=evaluation(sampler))

    assert str(forecast(make(), num_rounds=ROUNDS, names=NAMES)) == str(spent(make()))


def test_the_forecast_ends_where_the_run_will_and_counts_the_most_replies_of_a_client():
    strategy = DPFedAvg(**COMMON, noise_multiplier=4.0, sampling=FullSampling(), target_epsilon=2.0)
    found = forecast(strategy, num_rounds=50, names=NAMES)
    assert 0 < found.num_charged_rounds < 50
    assert found.epsilon <= 2
    drawn = NbAFL(**PROVED, cohort_size=8)
    found = forecast(drawn, num_rounds=ROUNDS, names=NAMES)
    assert (found.num_charged_rounds, found.clients.maximum > 0.99 * 3) == (ROUNDS, True)
