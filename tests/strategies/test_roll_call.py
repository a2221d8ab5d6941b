"""The roll call of apps that are not this package's: their refusal of a question is an answer, not an error to show."""

import logging

import numpy as np
import pytest
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app


class LoudGrid(LocalGrid):
    """Logs the errors of a ClientApp as Flower's simulation does, in the server's process."""

    def send_and_receive(self, messages, *, timeout=None):
        for reply in super().send_and_receive(messages, timeout=timeout):
            if reply.has_error():
                logging.getLogger("flwr").error("Traceback (most recent call last): %s", reply.error.reason)
            yield reply


class Stock(NumPyClient):
    def fit(self, parameters, config):
        return [value + 1 for value in parameters], 7, {}


def run(app):
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=0, sampling=FullSampling(), num_clients=2, delta=1e-3)
    strategy.start(LoudGrid(app, 2), arrays(w=np.zeros(4, np.float32)), num_rounds=1)
    return strategy


@pytest.fixture
def errors():
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Keep(level=logging.ERROR)
    logging.getLogger("flwr").addHandler(handler)
    yield records
    logging.getLogger("flwr").removeHandler(handler)


@pytest.mark.parametrize(
    "app",
    [stock_app(shifted(lambda node: 1.0)), ClientApp(client_fn=lambda context: Stock().to_client())],
    ids=["message", "numpy"],
)
def test_the_roll_call_of_stock_clients_leaves_no_error_in_the_log(app, errors):
    assert run(app).rounds[0].replies == 2
    assert errors == []
    assert logging.getLogger("flwr").filters == []


def test_an_app_that_fails_for_another_reason_is_shown(errors):
    def broken(context):
        raise FileNotFoundError("no data on this node")

    with pytest.raises(RuntimeError, match="no data on this node"):
        run(ClientApp(client_fn=broken))
    assert "no data on this node" in errors[0]


def test_an_error_in_training_is_shown(errors):
    def train(node, named):
        raise ZeroDivisionError("by zero")

    with pytest.raises(RuntimeError, match="by zero"):
        run(stock_app(train))
    assert "by zero" in errors[0]
