"""A stock app without torch, which every process of a run would import, as the text of its module."""

HEAD = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_dp import record_run
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

server, client = ServerApp(), ClientApp()

class Model:
    shape = (2, 3)  # defined in the module itself


def first(context):
    pass


evaluate = None
"""
APPS = """
@client.train()
def train(message, context):
    first(context)
    trained = {name: Array(array.numpy() + np.full(Model.shape, 0.1, np.float32)) for name, array in message.content["arrays"].items()}
    content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 8})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    config = context.run_config
    strategy = DPFedAvg(clip_norm=0.5, noise_multiplier=2.0, sampling=FullSampling(), num_clients=NUM_CLIENTS, delta=1e-3)
    arrays = ArrayRecord({"weight": Array(np.zeros(Model.shape, np.float32))})
    record_run(strategy, grid, arrays, num_rounds=config["num-rounds"], config=config, evaluate_fn=evaluate)
"""


def module(own: str = "", *, num_clients: int = 20) -> str:
    """Return the text of a module with `server` and `client`, for the settings `num-rounds` and any others.

    Args:
        own: what the test has of its own: imports, `evaluate(server_round, arrays)`, and `first(context)`, which a client calls
            before it trains.
        num_clients: of the strategy; one a node.
    """
    return f"{HEAD}{own}{APPS}".replace("NUM_CLIENTS", str(num_clients))
