"""A Ray cluster that runs already: its address, what an app's files need to get there, and what its machines have installed."""

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

# How long an address may take to answer, twice, and a machine to say what it has.
_ANSWER_SECONDS = 5.0
_MACHINE_SECONDS = 120.0
_DISTRIBUTIONS = ("ray", "flwr", "flower-dp", "torch", "numpy")
_FORM = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:.%]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a process joins.

    Attributes:
        address: HOST:PORT of the head's GCS server.
        bundle: a zip file of the app's own files, which make every worker's working directory; empty for none.
    """

    address: str
    bundle: bytes = b""


def address_of(ray_address: str) -> str:
    """Return the HOST:PORT of a cluster, where somebody answers.

    Args:
        ray_address: HOST:PORT, or "auto": what RAY_ADDRESS says, else the cluster that `ray start` has begun on this machine.

    Raises:
        ValueError: it has another form.
        ConnectionError: nobody answers, or "auto" finds nothing.
    """
    address = _found() if ray_address == "auto" else ray_address
    form = _FORM.fullmatch(address)
    if form is None:
        hint = "; run on a machine of the cluster, without Ray's client protocol" if "://" in address else ""
        raise ValueError(f"Ray cluster {address!r}: must be HOST:PORT or auto{hint}")
    host, port = _seen_by_ray(form["host"].strip("[]")), int(form["port"])
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"Ray cluster {address!r}: none answers at {host}:{port} ({error})") from None
    asked = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _check_grpc(asked)
    return asked


def _check_grpc(address: str) -> None:
    """Refuse a server of another kind, which Ray would ask again and again."""
    import grpc  # noqa: PLC0415
    from ray._private.grpc_utils import init_grpc_channel  # noqa: PLC0415  (encrypted, where Ray is)

    channel = init_grpc_channel(address)
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        raise ConnectionError(f"Ray cluster {address!r}: what answers there is none, or expects TLS") from None
    finally:
        channel.close()


def _seen_by_ray(host: str) -> str:
    """Return the host that Ray will ask: it takes this machine's outward address for a local one, and waits there for minutes."""
    if host not in ("localhost", "127.0.0.1", "::1"):
        return host
    from ray._private.services import resolve_ip_for_localhost  # noqa: PLC0415  (a third of a second)

    return str(resolve_ip_for_localhost(host))


def _found() -> str:
    """Return the address that "auto" means. Ray itself would also take any Ray that happens to run here."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    noted = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108  (Ray's own place)
    try:
        return noted.read_text(encoding="utf-8").strip()
    except OSError:
        raise ConnectionError(
            f"Ray cluster 'auto': RAY_ADDRESS is not set, and `ray start` has begun no cluster on this machine ({noted})"
        ) from None


def bundled(app: App) -> bytes:
    """Return a zip file of what Flower bundles of an app; none of flower-dp's own, which is installed on every machine."""
    if app.own:
        return b""
    from flwr.cli.build import build_fab_from_disk  # noqa: PLC0415  (half a second)

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of a package that Flower uses
        content = build_fab_from_disk(app.folder)
    # The same files make the same zip, so that workers that have them stay.
    same = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as fab, zipfile.ZipFile(same, "w") as bundle:
        for name in sorted(fab.namelist()):
            bundle.writestr(zipfile.ZipInfo(name), fab.read(name))
    return same.getvalue()


# What is installed


def installed() -> dict[str, str]:
    """Return the versions that must be the same on every machine; of flower-dp also a digest of its files.

    Of a version what follows a `+` is left out: torch for CPUs and torch for GPUs may serve one run.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    found["flower-dp"] += f" with files {_digest()}"
    return found


def _digest() -> str:
    """Return a digest of flower-dp's code: a clip or a noise of another day has the same version."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return in which versions another machine differs; "" if in none."""
    return ", ".join(
        f"{name} {there.get(name, 'none')} in place of {version}" for name, version in here.items() if there.get(name) != version
    )


def check_machines(ray: Any, cpus: float, gpus: float) -> None:
    """Ask every machine on which a worker fits what it has installed.

    Args:
        ray: the module; this process has joined the cluster.
        cpus: of a worker.
        gpus: of a worker.

    Raises:
        ValueError: one has other versions than this machine, or can't say.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    asked = {}
    for node in ray.nodes():
        if fitting(node, cpus, gpus):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            question = ray.remote(installed).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            asked[question.remote()] = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
    ray.wait(list(asked), num_returns=len(asked), timeout=_MACHINE_SECONDS)
    here, wrong = installed(), []
    for answer, machine in asked.items():
        try:
            what = differences(here, ray.get(answer, timeout=0.1))
        except Exception as error:  # flower-dp is not there, or the machine does not answer
            what = f"does not say what it has installed: {last_line(str(error))}"
        if what:
            wrong.append(f"machine {machine}: {what}")
    if wrong:
        raise ValueError("\n".join([*wrong, "every machine of the cluster needs the same versions as this one"]))


def last_line(text: str) -> str:
    """Return the last line of what Ray says, or of those that name an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return ([line for line in lines if re.match(r"\w*Error\b", line)] or lines)[-1]


def fitting(node: Mapping[str, Any], cpus: float, gpus: float) -> int:
    """Return how many workers fit on a machine, as `ray.nodes()` describes it.

    A GPU is never shared by fractions of two.

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
    """Return how many workers fit on all machines that Ray has."""
    return sum(fitting(node, cpus, gpus) for node in ray.nodes())
