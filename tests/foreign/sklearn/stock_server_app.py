import json

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0)
    result = strategy.start(grid, ArrayRecord([np.zeros((3, 4)), np.zeros(3)]), num_rounds=2)
    with open("weights.json", "w") as file:
        json.dump([array.tolist() for array in result.arrays.to_numpy_ndarrays()], file)
