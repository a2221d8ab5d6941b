"""One machine of a Ray cluster on this one: python raylet.py PORT FOLDER head|more

`ray start` takes no second machine that listens to the loopback interface alone. The folder becomes its temporary one. Its
raylet's number is written to FOLDER/pid. It ends with its input.
"""

import sys
from pathlib import Path
from typing import Any

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

from flower_dp.simulation.workers import lean


def main(port: str, folder: str, role: str) -> None:
    place: dict[str, Any] = {"gcs_server_port": int(port)} if role == "head" else {"gcs_address": f"127.0.0.1:{port}"}
    params = RayParams(
        node_ip_address="127.0.0.1",
        temp_dir=folder,
        num_cpus=1,
        num_gpus=0,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        include_log_monitor=False,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        **place,
    )
    params.dashboard_agent_listen_port = None  # any that is free
    with lean(ray):  # the tests need no dashboard
        node = Node(params, head=role == "head", shutdown_at_exit=True, spawn_reaper=False)
    (raylet,) = node.all_processes["raylet"]
    part = Path(folder, "pid.part")
    part.write_text(str(raylet.process.pid))
    part.rename(Path(folder, "pid"))
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
