"""Three rounds of DP-FedAvg; the first process of the run holds round 2."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, or go on."""
    folder, resume = Path(str(context.run_config["folder"])), bool(context.run_config["resume"])
    (folder / "server.pid").write_text(str(os.getpid()))

    def hold(line: Mapping[str, Any]) -> None:
        if line["round"] == 1 and not resume:
            (folder / "hold").touch()

    strategy = DPFedAvg(
        clip_norm=0.5,
        noise_multiplier=2.0,
        sampling=FullSampling(),
        num_clients=1,
        delta=1e-3,
        registration_timeout=120.0,
        on_round=hold,
    )
    try:
        strategy.start(
            grid,
            ArrayRecord({"weights": Array(np.zeros(10, np.float32))}),
            num_rounds=3,
            checkpoint_dir=folder / "checkpoint",
            resume=resume,
        )
    finally:
        (folder / "statement.json").write_text(json.dumps(strategy.statement.to_dict()))
