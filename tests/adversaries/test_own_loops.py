"""Loops of a user's own, around rounds and evaluations in any order: none of them asks for more than is paid for."""

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord

from flower_dp.clients import NbAFLRecipe, Training, model_arrays
from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.strategies import DPFedAvg, NbAFL
from tests.closed_forms import gaussian_delta
from tests.grids import LocalGrid
from tests.local_grids import grid_of, linear, records
from tests.stock import arrays, shifted, stock_app

WORDS = {"clip_norm": 1.0, "noise_multiplier": 2.0, "num_clients": 2, "delta": 1e-3}
TARGET = 3.0
MODEL = arrays(w=np.zeros(9, np.float32))


def looped(strategy, asked, shift=0.1):
    """The rounds that were charged of those that a loop asks for; an empty cohort is charged, too."""
    grid, ran = LocalGrid(stock_app(shifted(lambda node: shift)), 2), []
    for server_round in asked:
        before = strategy.statement.num_charged_rounds
        try:
            messages = strategy.configure_train(server_round, MODEL, ConfigRecord(), grid)
        except ValueError as error:
            assert "no round was run" in str(error)  # noqa: PT017
            continue
        if strategy.statement.num_charged_rounds > before:
            strategy.aggregate_train(server_round, grid.send_and_receive(messages))
            ran.append(server_round)
    return ran


# How many rounds of everybody the target pays for, in closed form: n releases of multiplier z are one of z / sqrt(n).
AFFORDABLE = sum(gaussian_delta(2.0 / math.sqrt(count), TARGET) <= 1e-3 for count in range(1, 99))


@pytest.mark.parametrize(
    ("sampling", "asked", "ran"),
    [
        (FullSampling(), range(1, 20), AFFORDABLE),
        (FullSampling(), [1] * 20, AFFORDABLE),  # the plan alone would pay for each of them
        (PoissonSampling(sampling_rate=0.5), range(1, 40), None),
        # In turn the round after the one that is refused would cost nothing: it is another client's.
        (RoundRobinSampling(cohort_size=1), range(1, 40), 2 * AFFORDABLE),
    ],
)
def test_a_loop_of_ones_own_does_not_pass_the_target_and_an_ended_run_stays_so(sampling, asked, ran):
    """It asks nobody whether a round can be paid for, as in Flower's advanced example."""
    strategy = DPFedAvg(**WORDS, sampling=sampling, target_epsilon=TARGET)
    strategy.plan(50)
    done = looped(strategy, asked)
    if ran is None:  # as many as in a run of `start`
        planned = DPFedAvg(**WORDS, sampling=sampling, target_epsilon=TARGET)
        planned.start(LocalGrid(stock_app(shifted(lambda node: 0.1)), 2), MODEL, num_rounds=40)
        ran = len(planned.rounds)
    assert done == list(asked)[:ran]
    assert 0 < strategy.statement.epsilon <= TARGET
    assert [line for line in strategy.statement.incidents if "ended before" in line] == [
        f"ended before round {asked[ran]}: it would pass target_epsilon=3"
    ]


@pytest.mark.parametrize("asked", [(2, 4, 6, 8), (1, 2, 2, 2), (1, 1), (1, 3)])
def test_round_robin_runs_its_rounds_in_order_or_not_at_all(asked):
    """Its charge follows from the round's number: client 2 was once asked four times at a stated epsilon of 0."""
    strategy = DPFedAvg(**WORDS, sampling=RoundRobinSampling(cohort_size=1))
    ran = looped(strategy, asked)
    assert ran == [number for index, number in enumerate(asked) if asked[: index + 1] == tuple(range(1, index + 2))]
    assert (strategy.statement.epsilon > 0) == bool(ran)


def test_a_loop_of_ones_own_fails_where_nobody_answers():
    with pytest.raises(RuntimeError, match="no client has sent a usable update"):
        looped(DPFedAvg(**WORDS, sampling=FullSampling()), range(1, 40), shift=math.nan)


def test_nbafl_without_its_plan_asks_nobody():
    """Its downlink noise depends on the number of rounds, which a loop of one's own does not tell."""
    words = {"clip_norm": 1.5, "paper_epsilon": 2.0, "delta": 0.01, "uplink_exposures": 9}
    recipe = NbAFLRecipe(training=Training(learning_rate=0.1), min_records=8, **words)
    grid = grid_of(recipe, {name: records(name) for name in ("c0", "c1")})
    with pytest.raises(RuntimeError, match=r"plan\(num_rounds\)"):
        NbAFL(**words, num_clients=2, num_records=8).configure_train(1, model_arrays(linear()), ConfigRecord(), grid)
