"""A SuperLink that is killed -9 and started again, with a SuperNode that stays up: a ServerApp that is started again goes on with it.

    python -m tests.crash.deployment

Round 2 is on the device when SuperLink and ServerApp are killed; the run must end with round 3, and state all three. It takes a minute.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store
from tests.ports import free_ports, listens
from tests.test_deployment import end_all, end_group, wait_until

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}


class Loop:
    """SuperLink, SuperNode and operator on one machine; each program has its own log."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        self.port, self.runtime = free_ports(2)
        (folder / "operator").mkdir()
        (folder / "operator" / "config.toml").write_text(
            f'[superlink.loop]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    def spawn(self, name, program, *words):
        own = {"FLWR_HOME": str(self.folder / name), "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [str(BIN / program), *words],
                cwd=self.folder,
                env=os.environ | OFFLINE | own | {"PATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def link(self):
        words = ("--insecure", "--database", str(self.folder / "link.db"), "--disable-runtime-dependency-installation")
        process = self.spawn("link", "flower-superlink", *words, "--host", "127.0.0.1", "--port", str(self.port))
        wait_until(lambda: listens(self.port), f"the SuperLink doesn't listen: {self.log('link')}")
        return process

    def node(self):
        words = ("--insecure", "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(self.runtime))
        return self.spawn("node", "flower-supernode", *words, "--node-config", f'folder="{self.folder}"')

    def run(self, *, resume):
        config = f'folder="{self.folder}" resume={str(resume).lower()}'
        return self.spawn("operator", "flwr", "run", str(HERE / "lasting"), "loop", "--stream", "-c", config)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()[-3000:]

    @property
    def server(self):
        """The process of the ServerApp."""
        return int((self.folder / "server.pid").read_text())

    def rounds(self):
        """The rounds in the ledger."""
        try:
            with Store(self.folder / "checkpoint" / "ledger.sqlite", read_only=True) as ledger:
                return [charge.server_round for run in ledger.runs for charge in ledger.read(run)]
        except LedgerError:
            return []


def go_on_after_a_kill(loop):
    link, node = loop.link(), loop.node()
    loop.run(resume=False)
    wait_until(lambda: loop.rounds() == [1, 2], f"round 2 doesn't begin: {loop.log('operator')}")
    wait_until(lambda: len((loop.folder / "asked").read_text()) >= 2, "nobody is asked in round 2")
    end_group(link, signal.SIGKILL)
    # It outlives its SuperLink, and holds the ledger until it notices.
    os.kill(loop.server, signal.SIGKILL)
    (loop.folder / "hold").unlink()
    link.wait(200)

    loop.link()
    assert loop.run(resume=True).wait(900) == 0
    assert node.poll() is None
    statement = json.loads((loop.folder / "statement.json").read_text())
    assert statement["guarantee"]["num_charged_rounds"] == 3
    assert [line for line in statement["incidents"] if "not finished" in line] == ["round 2 was charged and not finished"]
    assert loop.rounds() == [1, 2, 3]
    assert re.search(r"ROUND 3/3", loop.log("operator"))


def main():
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder))
        try:
            go_on_after_a_kill(loop)
        finally:
            (loop.folder / "hold").unlink(missing_ok=True)
            end_all(loop.started)
    sys.stdout.write("the run went on with the same node\n")


if __name__ == "__main__":
    main()
