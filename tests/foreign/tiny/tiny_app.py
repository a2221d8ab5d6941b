"""The smallest Flower App: every node answers, nobody trains."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_dp import record_run
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

server, client = ServerApp(), ClientApp()


@server.main()
def serve(grid, context):
    config = context.run_config
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=1.0, sampling=FullSampling(), num_clients=2, delta=1e-5)
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})

    def pause(server_round, arrays):
        time.sleep(float(config["pause"]))

    record_run(strategy, grid, arrays, num_rounds=int(config["num-rounds"]), config=config, evaluate_fn=pause)


@client.train()
def answer(message, context):
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
