"""Apps of Flower's old server API get an error that says what to write instead."""

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import ServerApp

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from flower_dp.strategies.legacy import LegacyAppError
from tests.grids import LocalGrid


def dp_fedavg():
    return DPFedAvg(clip_norm=1.0, noise_multiplier=1.0, sampling=FullSampling(), num_clients=2, delta=1e-5)


def test_server_fn_is_told_what_to_write():
    strategy = dp_fedavg()
    app = ServerApp(server_fn=lambda context: ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2)))
    grid = LocalGrid(ClientApp(), 2)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(LegacyAppError) as answer:
        app(grid, context)
    text = str(answer.value)
    assert text.startswith("DPFedAvg runs on Flower's Message API; ServerApp(server_fn=...)")
    for line in ("app = ServerApp()", "@app.main()", "DPFedAvg(...).start(grid, ArrayRecord("):
        assert line in text
    assert not grid.sent
    assert not strategy.rounds


def test_the_error_comes_from_what_flower_calls_first():
    with pytest.raises(LegacyAppError):
        Server(client_manager=SimpleClientManager(), strategy=dp_fedavg()).fit(num_rounds=1, timeout=None)
