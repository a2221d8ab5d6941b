import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class FlowerClient(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def fit(self, parameters, config):
        return [array + np.float32(0.1 * (1 + self.partition)) for array in parameters], 10, {}

    def evaluate(self, parameters, config):
        return 0.5, 10, {"accuracy": 0.5}


def client_fn(context):
    return FlowerClient(context.node_config["partition-id"]).to_client()


app = ClientApp(client_fn=client_fn)
