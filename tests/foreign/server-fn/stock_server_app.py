import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


def server_fn(context):
    strategy = FedAvg(
        fraction_fit=1.0,
        initial_parameters=ndarrays_to_parameters([np.zeros((2, 3), np.float32), np.zeros(2, np.float32)]),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))


app = ServerApp(server_fn=server_fn)
