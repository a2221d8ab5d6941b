import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from task import make_model

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=1)
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
