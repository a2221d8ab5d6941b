"""The smallest Flower App: every node answers, nobody trains."""

import time

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_dp.running.run_folder import RunFolder

server = ServerApp()
client = ClientApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    config = dict(context.run_config)
    folder = RunFolder.create(str(config["output-dir"]) or None, config, "tiny")
    num_rounds = int(config["num-rounds"])
    while len(list(grid.get_node_ids())) < 2:  # Flower starts the server before the nodes
        time.sleep(0.1)
    start = time.perf_counter()
    for server_round in range(1, num_rounds + 1):
        question = RecordDict({"config": ConfigRecord({"greeting": str(config["greeting"])})})
        messages = [Message(question, dst_node_id=node, message_type=MessageType.QUERY) for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
        time.sleep(float(config["pause"]))
        folder.append(
            {
                "round": server_round,
                "num-rounds": num_rounds,
                "loss": 1.0 / server_round,
                "accuracy": 0.5,
                "epsilon": 0.1 * server_round,
                "delta": 1e-5,
                "replies": len(replies),
                "greeting": next(str(r.content["config"]["greeting"]) for r in replies),
                "elapsed": time.perf_counter() - start,
            }
        )
    folder.state({"epsilon": 0.1 * num_rounds}, "Nothing private happened here.")
    if config["fail"]:
        raise RuntimeError("the tiny app was told to fail")
    folder.finish({"w": np.zeros(3, np.float32)})


@client.query()
def answer(message: Message, context: Context) -> Message:
    return Message(RecordDict({"config": message.content["config"]}), reply_to=message)
