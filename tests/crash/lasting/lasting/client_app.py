"""A stock client, whose rounds last as long as a file is there."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Add a constant to every array."""
    arrays = {name: Array(array.numpy() + np.float32(0.01)) for name, array in message.content["arrays"].items()}
    folder = Path(str(context.node_config["folder"]))
    with (folder / "asked").open("a") as file:
        file.write("x")
    while (folder / "hold").exists():
        time.sleep(0.05)
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
