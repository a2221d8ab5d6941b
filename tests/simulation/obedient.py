"""Apps that do what a message says. A worker that imports them needs no torch, and is there at once."""

import os
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_dp.simulation.worker import Worker


def to(node, **what):
    return Message(RecordDict({"ask": ConfigRecord(what)}), node, "train")


def reported(reply):
    return dict(reply.content["told"])


def app_that(act):
    """An app that counts its messages in its state, and tells what `act(ask, count)` returns."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = context.state["count"]["n"] if "count" in context.state else 0
        context.state["count"] = ConfigRecord({"n": count + 1})
        ask = dict(message.content["ask"])
        answer = act(ask, count + 1)
        if not isinstance(answer, dict):
            return answer
        node = {"node": context.node_id, "part": context.node_config["partition-id"], "process": os.getpid()}
        node["parts"] = context.node_config["num-partitions"]
        return Message(RecordDict({"told": ConfigRecord({"count": count + 1} | node | answer)}), reply_to=message)

    return app


def obey(ask, count):
    """Do what a message says."""
    match ask.get("do"):
        case "raise":
            raise ValueError(f"no {ask['what']}")
        case "exit":
            raise SystemExit("the app ends its process")
        case "die":
            os._exit(1)
        case "sleep":
            time.sleep(ask["seconds"])
        case "wait":
            while not Path(ask["until"]).exists():
                time.sleep(0.01)
        case "touch":
            Path(ask["what"]).touch()
        case "return nothing":
            return None
    return {}


def forging(message: Message, context: Context) -> Message:
    reply = Message(RecordDict(), reply_to=message)
    what = message.content["ask"]["forge"]
    reply.metadata.__dict__["_src_node_id" if what == "node" else "_reply_to_message_id"] = 5 if what == "node" else "x"
    return reply


def counted(message: Message, context: Context) -> Message:
    return Message(RecordDict({"told": ConfigRecord({"process": os.getpid()} | dict(context.node_config))}), reply_to=message)


def pair(found):
    """An app that asks every node for its process, and puts the answers into `found`."""
    server, client = ServerApp(), ClientApp()
    client.query()(counted)

    @server.main()
    def main(grid, context):
        messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
        found.append([dict(reply.content["told"]) for reply in grid.send_and_receive(messages)])
        if context.run_config.get("fail"):
            raise RuntimeError("told to fail")

    return server, client


class Broken(Worker):
    """A worker whose machine lacks what it needs."""

    def __init__(self):
        raise ModuleNotFoundError("No module named 'flower_dp'")
