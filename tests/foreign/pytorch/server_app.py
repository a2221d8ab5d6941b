import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from task import make_model

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = DPFedAvg(clip_norm=1.0, noise_multiplier=0.31, sampling=FullSampling(), num_clients=4, delta=1e-3)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
