"""A method of the contract suite with fixed noise, hosted by two nodes.

The model and the records are those of `tests.local_grids`, which a run of Flower can't import: it changes Flower's identity of a run.
"""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flower_dp import record_run
from flower_dp.clients import TensorRecords, client_app, model_arrays
from tests.contracts import METHODS, NUM_RECORDS, Words

SEED = 7
WORDS = Words(noise_seed=SEED)

server = ServerApp()


def linear():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 3, bias=False))


def records(client):
    rng = torch.Generator().manual_seed(client + 100)
    inputs = torch.randn(NUM_RECORDS, 6, generator=rng)
    return TensorRecords(inputs=inputs, targets=torch.randint(3, (NUM_RECORDS,), generator=rng))


def method_of(context):
    (method,) = [method for method in METHODS if method.label == context.run_config["label"]]
    return method


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = method_of(context).strategy(WORDS)
    record_run(strategy, grid, model_arrays(linear()), num_rounds=WORDS.num_rounds, config=context.run_config)
    if context.run_config["fail"]:
        raise RuntimeError("the seeded app was told to fail")


def client_fn(context: Context):
    part, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    hosted = {f"c{client}": records(client) for client in range(part, WORDS.num_clients, parts)}
    return method_of(context).client(WORDS, model=linear(), clients=hosted, noise_seed=SEED)


client = client_app(client_fn)
