import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Logged

app = ServerApp()


class CustomFedAvg(Logged, FedAvg):
    train_config = ConfigRecord()


@app.main()
def main(grid, context):
    strategy = CustomFedAvg(fraction_train=1.0)
    strategy.start(grid, ArrayRecord({"weight": Array(np.zeros((2, 3), np.float32))}), num_rounds=3)
