import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from task import Logged

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

app = ServerApp()


class CustomFedAvg(Logged, DPFedAvg):
    train_config = ConfigRecord()


@app.main()
def main(grid, context):
    strategy = CustomFedAvg(clip_norm=1.0, noise_multiplier=0.31, sampling=FullSampling(), num_clients=4, delta=1e-3)
    strategy.start(grid, ArrayRecord({"weight": Array(np.zeros((2, 3), np.float32))}), num_rounds=3)
    print(strategy.statement)
