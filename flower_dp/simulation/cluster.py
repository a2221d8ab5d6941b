"""A running Ray cluster: its address, the bundle of an app's files, and the versions that its machines have installed."""

import hashlib
import importlib.metadata
import io
import os
import platform
import re
import socket
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_dp.running.apps import App

# How long an address may take to answer, twice, and a machine to name its versions.
_ANSWER_SECONDS = 5.0
_MACHINE_SECONDS = 120.0
_DISTRIBUTIONS = ("ray", "flwr", "flower-dp", "torch", "numpy")
_FORM = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:.%]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray cluster that a process joins.

    Attributes:
        address: HOST:PORT of the head's GCS server.
        bundle: zip file of the app's own files, the working directory of every worker; empty for none.
    """

    address: str
    bundle: bytes = b""


def address_of(ray_address: str) -> str:
    """Return the HOST:PORT of a cluster, once a server answers there.

    Args:
        ray_address: HOST:PORT, or "auto": the value of RAY_ADDRESS, else the cluster that `ray start` began on this machine.

    Raises:
        ValueError: if the address has another form.
        ConnectionError: if no Ray cluster answers, or "auto" finds none.
    """
    address = _address_of_auto() if ray_address == "auto" else ray_address
    form = _FORM.fullmatch(address)
    if form is None:
        hint = "; run on a machine of the cluster, without Ray's client protocol" if "://" in address else ""
        raise ValueError(f"Ray cluster {address!r}: must be HOST:PORT or auto{hint}")
    host, port = _seen_by_ray(form["host"].strip("[]")), int(form["port"])
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"Ray cluster {address!r}: none answers at {host}:{port} ({error})") from None
    resolved = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _check_grpc(resolved)
    return resolved


def _check_grpc(address: str) -> None:
    """Refuse a server that is not a Ray cluster. Ray itself would retry without end."""
    import grpc  # noqa: PLC0415
    from ray._private.grpc_utils import init_grpc_channel  # noqa: PLC0415  (encrypted if Ray is)

    channel = init_grpc_channel(address)
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        raise ConnectionError(f"Ray cluster {address!r}: the server there is not a Ray cluster, or expects TLS") from None
    finally:
        channel.close()


def _seen_by_ray(host: str) -> str:
    """Return the host that Ray connects to: for a local host, Ray uses this machine's outward address and waits for minutes."""
    if host not in ("localhost", "127.0.0.1", "::1"):
        return host
    from ray._private.services import resolve_ip_for_localhost  # noqa: PLC0415  (a third of a second)

    return str(resolve_ip_for_localhost(host))


def _address_of_auto() -> str:
    """Return the address for "auto". Ray itself would also join any other Ray that runs on this machine."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108  (Ray's own place)
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        raise ConnectionError(
            f"Ray cluster 'auto': RAY_ADDRESS is not set, and `ray start` has begun no cluster on this machine (no {file}); "
            "give HOST:PORT"
        ) from None


def bundled(app: App) -> bytes:
    """Return a zip file of the files that Flower bundles of an app. It is empty for flower-dp's own app, installed everywhere."""
    if app.own:
        return b""
    from flwr.cli.build import build_fab_from_disk  # noqa: PLC0415  (half a second)

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of a package that Flower uses
        content = build_fab_from_disk(app.folder)
    # The same files must make the same bytes: Ray then keeps workers that already have them.
    same = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as fab, zipfile.ZipFile(same, "w") as bundle:
        for name in sorted(fab.namelist()):
            bundle.writestr(zipfile.ZipInfo(name), fab.read(name))
    return same.getvalue()


def installed() -> dict[str, str]:
    """Return the versions that must be the same on every machine; for flower-dp also a digest of its files.

    A version's part after `+` is left out: torch for CPUs and torch for GPUs may serve one run.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    versions["flower-dp"] += f" with files {_digest()}"
    return versions


def _digest() -> str:
    """Return a digest of flower-dp's code: two states of the code, with another clip or noise, may have one version."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return the versions in which another machine differs, as text; "" if none."""
    return ", ".join(
        f"{name} {there.get(name, 'none')} in place of {version}" for name, version in here.items() if there.get(name) != version
    )


def check_machines(ray: Any, cpus: float, gpus: float) -> None:
    """Compare the versions of every machine on which a worker fits with those of this machine.

    Args:
        ray: Ray's module; this process has joined the cluster.
        cpus: CPU cores of a worker.
        gpus: GPUs of a worker.

    Raises:
        ValueError: if a machine has other versions than this one, or does not reply.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    pending = {}
    for node in ray.nodes():
        if fitting(node, cpus, gpus):
            placed = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(installed).options(num_cpus=0, max_retries=0, scheduling_strategy=placed)
            pending[task.remote()] = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
    ray.wait(list(pending), num_returns=len(pending), timeout=_MACHINE_SECONDS)
    here, wrong = installed(), []
    for reference, machine in pending.items():
        try:
            problem = differences(here, ray.get(reference, timeout=0.1))
        except Exception as error:  # flower-dp is not there, or the machine does not reply
            problem = f"does not say what it has installed: {last_line(str(error))}"
        if problem:
            wrong.append(f"machine {machine}: {problem}")
    if wrong:
        raise ValueError("\n".join([*wrong, "every machine of the cluster needs the same versions as this one"]))


def last_line(text: str) -> str:
    """Return the last line of Ray's text that names an error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return ([line for line in lines if re.match(r"\w*Error\b", line)] or lines)[-1]


def fitting(node: Mapping[str, Any], cpus: float, gpus: float) -> int:
    """Return the number of workers that fit on a machine, as `ray.nodes()` describes it.

    No worker gets parts of two GPUs.

    Example:
        >>> from flower_dp.simulation.cluster import fitting
        >>> node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}
        >>> fitting(node, 1.0, 0.4), fitting(node, 1.0, 2.0), fitting(node, 3.0, 0.0)
        (4, 1, 2)
    """
    has = node["Resources"] if node["Alive"] else {}
    of_cpus = int(has.get("CPU", 0) / cpus)
    if not gpus:
        return of_cpus
    return min(of_cpus, int(has.get("GPU", 0)) * int(1 / gpus) if gpus <= 1 else int(has.get("GPU", 0) / gpus))


def fits(ray: Any, cpus: float, gpus: float) -> int:
    """Return the number of workers that fit on all of Ray's machines."""
    return sum(fitting(node, cpus, gpus) for node in ray.nodes())
