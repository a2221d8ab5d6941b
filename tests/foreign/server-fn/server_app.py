import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=0.31, sampling=FullSampling(), num_clients=4, delta=1e-3)
    strategy.start(grid, ArrayRecord([np.zeros((2, 3), np.float32), np.zeros(2, np.float32)]), num_rounds=2)
