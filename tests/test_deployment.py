"""A real deployment on loopback: a SuperLink, two SuperNodes with one client each, and `flwr run`."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def wait_for(port, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")


@pytest.mark.flwr_run
def test_two_supernodes_with_one_client_each_train_privately(tmp_path):
    link, *nodes = free_ports(3)
    environment = os.environ | {
        "FLWR_HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(f'[superlink.loop]\naddress = "127.0.0.1:{link}"\ninsecure = true\n')
    settings = {
        "method": '"dp-fedsam"',
        "num-clients": 2,
        "sampling": '"full"',
        "num-rounds": 2,
        "dp-fedsam.noise-multiplier": 5.0,
        "dp-fedsam.delta": 1e-3,
        "batch-size": 100,
        "output-dir": f'"{tmp_path / "run"}"',
    }
    (tmp_path / "run.toml").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    started = []

    def spawn(*command):
        with (tmp_path / f"{len(started)}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [BIN / command[0], *command[1:]],
                    cwd=tmp_path,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    try:
        spawn("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(link))
        wait_for(link)
        for index, port in enumerate(nodes):
            spawn(
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{link}",
                "--port",
                str(port),
                "--node-config",
                f"partition-id={index} num-partitions=2",
            )
        done = subprocess.run(
            [BIN / "flwr", "run", REPOSITORY, "loop", "--stream", "-c", tmp_path / "run.toml"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        statement_file = tmp_path / "run" / "statement.json"
        assert statement_file.is_file(), done.stdout[-3000:] + done.stderr[-1000:]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)
    statement = json.loads(statement_file.read_text())
    rounds = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Two Gaussian releases of multiplier 5 are one of 5 / sqrt(2); its exact epsilon at delta = 2^-1.1 is 0.
    assert statement["private"]
    assert statement["num_rounds"] == 2
    assert [line["replies"] for line in rounds[1:]] == [2, 2]
    assert rounds[-1]["accuracy"] > rounds[0]["accuracy"]
