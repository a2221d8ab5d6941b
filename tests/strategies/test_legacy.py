"""Apps of Flower's old server API get an error that says what to write instead."""

import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import Grid, ServerApp

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, FedSGDDPC
from flower_dp.strategies.legacy import LegacyAppError
from tests.grids import LocalGrid
from tests.local_grids import linear


def dp_fedavg():
    return DPFedAvg(clip_norm=1.0, noise_multiplier=1.0, sampling=FullSampling(), num_clients=2, delta=1e-5)


def fedsgd_dpc():
    return FedSGDDPC(
        mechanism="laplace", num_clients=2, cohort_size=2, num_records=8, clip_norm=0.5, epsilon=1.0, learning_rate=0.1
    )


@pytest.mark.parametrize("make", [dp_fedavg, fedsgd_dpc])
def test_server_fn_is_told_what_to_write(make):
    strategy = make()
    app = ServerApp(server_fn=lambda context: ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2)))
    grid = LocalGrid(ClientApp(), 2)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(LegacyAppError) as answer:
        app(grid, context)
    text = str(answer.value)
    name = type(strategy).__name__
    assert text.startswith(f"{name} runs on Flower's Message API; ServerApp(server_fn=...)")
    for line in ("app = ServerApp()", "@app.main()", f"{name}(...).start(grid, ArrayRecord("):
        assert line in text
    assert not grid.sent
    assert not strategy.rounds


def test_the_error_comes_from_what_flower_calls_first():
    with pytest.raises(LegacyAppError):
        Server(client_manager=SimpleClientManager(), strategy=dp_fedavg()).fit(num_rounds=1, timeout=None)


def test_what_the_error_tells_works():
    """The lines that the error shows, with a model of this test's."""
    app = ServerApp()
    finished = []

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = dp_fedavg()
        arrays = ArrayRecord(linear().state_dict())
        with pytest.raises(RuntimeError, match="no client has sent a usable update"):
            strategy.start(grid, arrays, num_rounds=1)
        finished.append(strategy.statement.num_rounds)

    app(LocalGrid(ClientApp(), 2), Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}))
    assert finished == [1]
