"""Flower's server optimizers behind the noise; expected models by hand and by Flower itself."""

import logging

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, QFedAvg

from flower_dp.core.sampling import FullSampling
from flower_dp.core.vectors import Layout
from flower_dp.strategies import DPFedAvg
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.server_optimizer import ServerOptimizer
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

LAYOUT = Layout.of({"w": np.zeros((2, 2), np.float32), "b": np.zeros(1, np.float32)})
START = np.array([1, 2, 3, 4, 5], np.float32)
WORDS = {"clip_norm": 1e6, "noise_multiplier": 1e-9, "sampling": FullSampling(), "num_clients": 2, "delta": 1e-3}


def steps(optimizer, moves):
    vector = START
    for server_round, move in enumerate(moves, 1):
        vector = optimizer.step(server_round, LAYOUT, vector, vector + np.asarray(move, np.float32))
    return vector


def test_a_second_run_starts_with_a_fresh_optimizer():
    strategy = DPFedAvg(**WORDS, server_optimizer=FedAdam(eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3))
    grid, zeros = LocalGrid(stock_app(shifted(lambda node: 0.25)), 2), arrays(w=np.zeros(4, np.float32))
    first, second = (strategy.start(grid, zeros, num_rounds=3).arrays["w"].numpy() for _ in range(2))
    np.testing.assert_allclose(first, second, rtol=1e-3)


def test_the_noise_reaches_the_optimizer_and_not_the_raw_mean():
    strategy = DPFedAvg(**WORDS | {"clip_norm": 1.0, "noise_multiplier": 50.0}, server_optimizer=FedAvgM(server_momentum=0.0))
    grid = LocalGrid(stock_app(shifted(lambda node: 0.0)), 2)
    result = strategy.start(grid, arrays(w=np.zeros(4000, np.float32)), num_rounds=1)
    # 50 / 2 clients; a chi-square of 4,000 degrees of freedom leaves 6 % about its mean with probability below 1e-6.
    assert 25 * 0.94 < result.arrays["w"].numpy().std() < 25 * 1.06


class Telling(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        config["temperature"] = 0.5
        return super().configure_train(server_round, arrays, config, grid)


UNFIT = {
    "a proximal term": (FedProx(proximal_mu=0.1), r"server_optimizer=FedProx: tells clients 'proximal-mu'.*ProximalTerm"),
    "one of one's own": (Telling(), "server_optimizer=Telling: tells clients 'temperature'"),
    "losses of clients": (QFedAvg(client_learning_rate=0.1), "server_optimizer=QFedAvg: its aggregate_train fails"),
}


class OwnStart(DPFedAvg):
    """An app with a loop of its own."""

    def start(self, grid, initial_arrays, **others):
        self.plan(1)
        list(self.configure_train(1, initial_arrays, ConfigRecord(), grid))


@pytest.mark.parametrize("method", [DPFedAvg, OwnStart])
@pytest.mark.parametrize("what", UNFIT)
def test_a_strategy_that_speaks_to_clients_or_needs_more_of_them_is_refused_before_any_is_asked(what, method, caplog):
    unfit, said = UNFIT[what]
    strategy = method(**WORDS, server_optimizer=unfit)
    grid = LocalGrid(stock_app(shifted(lambda node: 1.0)), 2)
    caplog.set_level(logging.INFO, "flwr")
    with pytest.raises(ValueError, match=said):
        strategy.start(grid, arrays(w=np.zeros(4, np.float32)), num_rounds=2)
    assert "1 nodes" not in caplog.text
    assert not grid.sent
    assert strategy.epsilon == 0


@pytest.mark.parametrize("kind", ["FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedMedian", "FedTrimmedAvg", "Krum"])
def test_flowers_strategies_that_only_aggregate_are_not_refused(kind):
    ServerOptimizer(getattr(flowers, kind)()).check(LAYOUT, START)


def test_what_is_no_strategy_is_refused():
    with pytest.raises(ValueError, match="server_optimizer='adam': must be a Flower strategy"):
        DPFedAvg(**WORDS, server_optimizer="adam")


def test_a_model_that_is_not_finite_leaves_the_round_out():
    class Broken(FedAvg):
        def aggregate_train(self, server_round, replies):
            return ArrayRecord({name: Array(np.full(shape, np.nan)) for name, shape in (("w", (2, 2)), ("b", (1,)))}), None

    with pytest.raises(RoundDiscarded, match="Broken gave a model with NaN"):
        steps(ServerOptimizer(Broken()), [1])


def test_after_a_round_that_is_left_out_the_optimizer_goes_on_as_if_it_had_not_been():
    """Its NaN stayed in the momentum: all later rounds were charged and left out as well."""

    class Bursting(FedAvgM):
        def aggregate_train(self, server_round, replies):
            result, metrics = super().aggregate_train(server_round, replies)
            if server_round == 2:
                self.momentum_vector = [vector * np.nan for vector in self.momentum_vector]
                result = ArrayRecord({name: Array(array.numpy() * np.nan) for name, array in result.items()})
            return result, metrics

    strategy = DPFedAvg(**WORDS, server_optimizer=Bursting(server_learning_rate=1.0, server_momentum=0.5))
    grid = LocalGrid(stock_app(shifted(lambda node: 1.0)), 2)
    model = strategy.start(grid, arrays(w=np.zeros(4, np.float32)), num_rounds=4).arrays["w"]
    # Steps of 1, 0 (left out), 1 + 1/2, 1 + 3/4.
    np.testing.assert_allclose(model.numpy(), 1 + 1.5 + 1.75, rtol=1e-2)
    assert len(strategy.incidents) == 1


@pytest.mark.parametrize("entry", [np.nan, np.inf, 1e300])
def test_a_model_that_is_not_finite_as_float32_costs_nothing(entry):
    strategy, grid = DPFedAvg(**WORDS), LocalGrid(stock_app(shifted(lambda node: 0.0)), 2)
    with pytest.raises(ValueError, match=r"array 'w' has (NaN or infinite entries|entries beyond the range of float32)"):
        strategy.start(grid, arrays(v=np.zeros(2, np.float32), w=np.array([0.0, entry])), num_rounds=1)
    assert strategy.rules.ledger(strategy.charges).num_charges == 0
    assert not grid.sent
