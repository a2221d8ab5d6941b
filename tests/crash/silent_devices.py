"""SuperNodes that are killed or stopped: a start does not wait for one that is dead, and silent rounds end a run that then goes on.

    python -m tests.crash.silent_devices

Of four SuperNodes the one with the lowest id is killed -9 just before the run. The others are stopped in one round, three silent
rounds end the run, and when they are back it goes on. It takes five minutes.
"""

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from flower_dp.strategies.checkpoint import CheckpointFolder
from tests.crash.deployment import Loop
from tests.ports import free_ports
from tests.test_deployment import ACTIVE, end_all, end_group, wait_until

NODES, ROUNDS, TIMEOUT = 4, 9, 40.0
PROJECT = """
[project]
name = "silent"
version = "0.1.0"
[tool.flwr.app]
publisher = "flower-dp"
[tool.flwr.app.components]
serverapp = "silent.app:server"
clientapp = "silent.app:client"
[tool.flwr.app.config]
folder = ""
resume = false
"""
APP = f"""
import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_dp.clients import privacy_mod
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg

server = ServerApp()
client = ClientApp(mods=[privacy_mod(name=lambda context: str(context.node_config["name"]))])


@client.train()
def train(message, context):
    arrays = {{name: Array(array.numpy() + np.float32(0.01)) for name, array in message.content["arrays"].items()}}
    content = {{"arrays": ArrayRecord(arrays), "metrics": MetricRecord({{"num-examples": 1}})}}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    folder = Path(str(context.run_config["folder"]))
    strategy = DPFedAvg(
        clip_norm=0.5, noise_multiplier=2.0, sampling=FullSampling(), num_clients={NODES - 1}, delta=1e-3, registration_timeout=300.0
    )
    try:
        arrays = ArrayRecord({{"weights": Array(np.zeros(10, np.float32))}})
        words = {{"checkpoint_dir": folder / "checkpoint", "resume": bool(context.run_config["resume"])}}
        strategy.start(grid, arrays, num_rounds={ROUNDS}, timeout={TIMEOUT}, **words)
    finally:
        told = {{"statement": strategy.statement.to_dict(), "replies": [report.replies for report in strategy.rounds]}}
        (folder / "told.json").write_text(json.dumps(told))
"""


class Devices(Loop):
    """Four SuperNodes, by their ids."""

    def begin(self):
        """Start them, and return their processes."""
        app = self.folder / "app" / "silent"
        app.mkdir(parents=True)
        (app / "__init__.py").touch()
        (app / "app.py").write_text(APP)
        (app.parent / "pyproject.toml").write_text(PROJECT)
        self.link()
        nodes = {}
        for number, port in enumerate(free_ports(NODES)):
            words = ("--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(port))
            process = self.spawn(f"node-{number}", "flower-supernode", *words, "--node-config", f'name="device-{number}"')
            wait_until(lambda number=number: ACTIVE in self.log(f"node-{number}"), f"no node: {self.log(f'node-{number}')}")
            nodes[int(re.findall(rf"{ACTIVE}(\d+)", self.log(f"node-{number}"))[-1])] = process
        return nodes

    def run(self, *, resume):
        (self.folder / "told.json").unlink(missing_ok=True)
        config = f'folder="{self.folder}" resume={str(resume).lower()}'
        return self.spawn("operator", "flwr", "run", str(self.folder / "app"), "loop", "--stream", "-c", config)

    def told(self, run):
        """What a run tells when it has ended, and its log is whole."""
        run.wait(900)
        return json.loads((self.folder / "told.json").read_text())


def end_and_go_on(loop):
    nodes = loop.begin()
    end_group(nodes.pop(min(nodes)), signal.SIGKILL)
    run = loop.run(resume=False)
    wait_until(lambda: 2 in loop.rounds(), f"round 2 doesn't begin: {loop.log('operator')}", 600)
    for node in nodes.values():
        os.killpg(node.pid, signal.SIGSTOP)
    told = loop.told(run)
    assert "KeyError" not in loop.log("operator")
    assert "no client has sent a usable update in the last 3 rounds" in loop.log("operator"), loop.log("operator")
    answered, charged = len(told["replies"]), told["statement"]["num_rounds"]
    assert 1 <= answered <= 2, told
    assert charged == answered + 3
    assert told["replies"][0] == NODES - 1
    assert CheckpointFolder(loop.folder / "checkpoint").read().server_round == answered
    for node in nodes.values():
        os.killpg(node.pid, signal.SIGCONT)
    told = loop.told(loop.run(resume=True))
    assert told["statement"]["num_rounds"] == ROUNDS
    assert told["replies"][-1] == NODES - 1, (told["replies"], loop.log("operator"))


def main():
    with tempfile.TemporaryDirectory() as folder:
        loop = Devices(Path(folder))
        try:
            end_and_go_on(loop)
        finally:
            for process in loop.started:
                end_group(process, signal.SIGCONT)
            end_all(loop.started)
    sys.stdout.write("a dead node held up no start, silent rounds ended the run, and it went on\n")


if __name__ == "__main__":
    main()
