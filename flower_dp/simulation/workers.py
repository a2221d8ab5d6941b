"""Ray and its actors that run ClientApps. Both stay from one simulation to the next."""

import atexit
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flower_dp.core import checks
from flower_dp.core.root_logger import SHOWN
from flower_dp.running.guard import short_folder
from flower_dp.running.preflight import default_workers
from flower_dp.running.run_workdir import environment
from flower_dp.simulation.cluster import Cluster, address_of, check_machines, fits, last_line

# Ray has no password, so everything listens on this machine's own address only.
_ADDRESS = "127.0.0.1"
# Environment of every process of Ray: messages of up to 4 MiB go directly to the worker, not through Ray's object store.
_MESSAGES = {"RAY_max_direct_call_object_size": str(2**22)}
# Environment of a Ray that starts.
STARTED = {
    **_MESSAGES,
    # By default Ray starts workers at niceness 15, so other programs would take the cores from the training.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Attempts of a process to reach another one that starts on this machine: by default one per second, ten times. A busy machine
    # needs longer, also for a worker's imports.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "3000",
    "RAY_worker_register_timeout_seconds": "180",
    # Otherwise Ray looks for a `uv run` among the parents of this process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # On Linux Ray would use this machine's outward address in place of its local one, and other machines could reach it.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

log = logging.getLogger("flwr")

# Held while Ray starts or ends.
_lock = threading.Lock()
# The Ray that this process started (its folder), or the cluster that it joined.
_ours: Path | Cluster | None = None
# Workers kept for the next run, by their kind. They end when others are made, which may need their cores.
_idle: dict[Any, "Workers"] = {}


class RayStartError(RuntimeError):
    """An error of Ray at its start on this machine; no run has begun."""


def start_ray(num_cpus: int, folder: Path | None = None, cluster: Cluster | None = None, *, to_screen: bool = True) -> Any:
    """Start Ray on this machine, or join a cluster, unless this process already has; return Ray's module.

    Args:
        num_cpus: number of one-core workers that may run at once on this machine.
        folder: folder of Ray's sockets and logs, removed with Ray; None for a new one.
        to_screen: whether this process shows the output of workers.
        cluster: cluster to join; None to start Ray here. If this process has called `ray.init` itself, that Ray serves for both.

    Raises:
        ImportError: if Ray is not installed.
        RayStartError: if Ray does not start in two attempts.
        ConnectionError: if this process can't join the cluster, with Ray's reason.
    """
    global _ours  # noqa: PLW0603  (there is one Ray in a process)
    if importlib.util.find_spec("ray") is None:
        raise ImportError("Ray is not installed: pip install 'flower-dp[simulation]'", name="ray")
    import ray  # noqa: PLC0415  (a third of a second)

    with _lock:
        if ray.is_initialized():
            if _ours is None:
                _check_theirs(ray, cluster)
                return ray
            if (_ours if isinstance(_ours, Cluster) else None) == cluster:
                return ray
            _stop(ray)
        if cluster is None:
            _ours = _start(ray, num_cpus, folder or short_folder(), to_screen)
        else:
            _join(ray, cluster)
            _ours = cluster
        atexit.register(stop_ray)
        return ray


def start_meanwhile(num_cpus: int, folder: Path) -> None:
    """Begin to start Ray in a thread. A later `start_ray` waits for it, and raises the error if Ray does not start."""
    importlib.import_module("ray")  # in this thread alone: two threads that import Ray would wait for each other

    def start() -> None:
        with suppress(Exception):
            start_ray(num_cpus, folder)

    threading.Thread(target=start, daemon=True).start()


def end_this_process() -> None:
    """Send SIGTERM to this process. If Ray starts, exit at once: Ray's own code may wait forever and ignores signals."""
    if _lock.locked():
        os._exit(1)  # no run has begun; Ray's processes end with this one
    os.kill(os.getpid(), signal.SIGTERM)


def _check_theirs(ray: Any, cluster: Cluster | None) -> None:
    """Refuse a cluster if the user's own `ray.init()` has joined another one."""
    joined = ray.get_runtime_context().gcs_address
    if cluster is not None and (cluster.bundle or joined != cluster.address):
        raise ConnectionError(
            f"Ray cluster {cluster.address!r}: this process called ray.init() itself, for {joined}; call ray.shutdown() first"
        )


def _join(ray: Any, cluster: Cluster) -> None:
    runtime: dict[str, Any] = {"env_vars": _MESSAGES}
    try:
        with (
            warnings.catch_warnings(),
            _sigterm_stays(),
            environment(_MESSAGES),
            tempfile.TemporaryDirectory(prefix="flower-dp-") as folder,
        ):
            warnings.simplefilter("ignore")
            if cluster.bundle:
                runtime["working_dir"] = str(Path(folder, "app.zip"))
                Path(folder, "app.zip").write_bytes(cluster.bundle)
            ray.init(address=cluster.address, runtime_env=runtime, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConnectionError(f"Ray cluster {cluster.address!r}: {str(error).strip()}") from error


def _start(ray: Any, num_cpus: int, folder: Path, to_screen: bool) -> Path:
    """Start Ray, and return its folder.

    If a thread other than the main one starts Ray and ends, Linux ends Ray's processes too. So a thread that never ends starts
    Ray then.
    """
    started, errors = threading.Event(), list[BaseException]()

    def start(*, stays: bool = True) -> None:
        try:
            _init(ray, num_cpus, folder, to_screen)
        except BaseException as error:
            errors.append(error)
            stays = False
        started.set()
        if stays:
            threading.Event().wait()

    if threading.current_thread() is threading.main_thread():
        start(stays=False)
    else:
        threading.Thread(target=start, name="Ray", daemon=True).start()
    started.wait()
    if errors:
        shutil.rmtree(folder, ignore_errors=True)
        raise errors[0]
    return folder


def _init(ray: Any, num_cpus: int, folder: Path, to_screen: bool = True) -> None:
    """Start Ray, in at most two attempts: on a busy machine or a slow disk the second may succeed.

    Raises:
        RayStartError: if Ray does not start.
    """
    paths = dict.fromkeys(str(Path(place).absolute()) for place in sys.path if Path(place).is_dir())
    constants = ray._private.ray_constants  # read from the environment when Ray was imported
    among_others, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    settings = STARTED | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        with warnings.catch_warnings(), _sigterm_stays(), lean(ray), environment(settings):
            warnings.simplefilter("ignore")  # Ray's notes on its future releases
            for again in (True, False):
                try:
                    ray.init(
                        address="local",
                        num_cpus=num_cpus,
                        include_dashboard=False,
                        logging_level=logging.ERROR,
                        log_to_driver=to_screen,
                        _node_ip_address=_ADDRESS,
                        _temp_dir=str(folder),
                    )
                    return
                except Exception as error:
                    if not again:
                        raise RayStartError(_start_error(error, folder)) from error
                    log.warning("Ray did not start, and is tried once more: %s", last_line(str(error)))
                    ray.shutdown()
    finally:
        constants.ENABLE_RAY_CLUSTER = among_others


def _start_error(error: Exception, folder: Path) -> str:
    """Return Ray's own reason, Ray's needs, and the last line of its processes' logs."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    free = shutil.disk_usage(folder.parent).free / 2**30
    logs = [file for name in ("raylet", "gcs_server") for file in folder.glob(f"session_*/logs/{name}.*") if file.stat().st_size]
    newest = max(logs, key=lambda file: file.stat().st_mtime, default=None)
    logged = "" if newest is None else last_line(newest.read_text(encoding="utf-8", errors="replace"))
    return (
        f"Ray does not start on this machine, tried twice: {last_line(str(error))}; it gives up if the machine is busy or "
        f"its disk slow (load {load} on {default_workers()} cores), without memory, or without space ({free:.1f} GiB free in "
        f"{folder.parent}): end other programs, and try again" + (f"; the last line of its log: {logged}" if logged else "")
    )


@contextmanager
def lean(ray: Any) -> Iterator[None]:
    """Start Ray within this context without its dashboard and its autoscaler, which one machine does not need.

    `ray.init` has no setting for it: even with `include_dashboard=False` it starts the dashboard's process and waits for it. The
    replaced methods are private to Ray; a version of Ray without them starts as usual.
    """
    node = getattr(getattr(ray._private, "node", None), "Node", object)
    stubs = {"start_api_server": lambda node, *_, **__: setattr(node, "_webui_url", ""), "start_monitor": lambda node: None}
    before = {name: getattr(node, name) for name in stubs if hasattr(node, name)}
    try:
        for name in before:
            setattr(node, name, stubs[name])
        yield
    finally:
        for name, usual in before.items():
            setattr(node, name, usual)


@contextmanager
def _sigterm_stays() -> Iterator[None]:
    """Start Ray within this context, and restore the handler of SIGTERM afterwards; by default SIGTERM ends this process.

    Ray has a handler of its own below Python's. It aborts this process after three seconds, before the run's own end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # By default Ray's other handler stays: it raises SystemExit, so that a run's statement is written.
        is_users = before not in (None, signal.SIG_DFL)
        after = before if is_users else signal.getsignal(signal.SIGTERM)
        if after is not None:  # None: the handler is not Python's, and can't be set here
            signal.signal(signal.SIGTERM, after)


def stop_ray() -> None:
    """End the Ray that `start_ray` started, or leave the cluster; both end all workers. A Ray of the user's own stays.

    A Ray that another thread starts at this moment stays too, and ends with this process.
    """
    if _lock.acquire(blocking=False):
        try:
            if _ours is not None:
                _stop(importlib.import_module("ray"))
        finally:
            _lock.release()


def _stop(ray: Any) -> None:
    global _ours  # noqa: PLW0603
    ray.shutdown()
    if isinstance(_ours, Path):
        for _ in range(30):  # Ray's processes write into the folder until they have ended
            shutil.rmtree(_ours, ignore_errors=True)
            if not _ours.exists():
                break
            time.sleep(0.1)
    _ours = None
    atexit.unregister(stop_ray)


class Workers:
    """Actors of one kind, each of which runs a ClientApp for one node at a time. A dead actor can be replaced.

    Args:
        num_workers: number of workers; None for as many as fit, machine by machine, but at most `at_most`.
        cpus: CPU cores of each worker; torch uses as many threads.
        gpus: fraction of a GPU for each worker; with 0 a worker sees no GPU.
        at_most: limit on the number of workers if `num_workers` is None; None for no limit.
        cluster: cluster of the workers; None for this machine.
        options: the user's names of `cpus` and `gpus`, for errors.

    Attributes:
        actors: Ray's handles. A replacement waits in Ray's queue until a machine has room for it.
        away: whether the workers are on a cluster, whose machines need not share a folder with this one.

    Raises:
        ValueError: if the workers do not fit.
        ImportError: if Ray is not installed.
        ConnectionError: if this process can't join the cluster.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        at_most: int | None = None,
        cluster: Cluster | None = None,
        options: tuple[str, str] = ("cpus", "gpus"),
    ) -> None:
        if num_workers is not None:
            checks.integer("num_workers", num_workers, at_least=1)
        checks.number(options[0], cpus, above=0)
        checks.number(options[1], gpus, at_least=0)
        self._ray = start_ray(max(default_workers(), num_workers or 0), cluster=cluster)
        self._session = session_of(self._ray)
        self.away = cluster is not None
        self._needs = cpus, gpus
        fit = fits(self._ray, cpus, gpus)
        if fit < (num_workers or 1):
            available = self._ray.cluster_resources()
            field = f"num_workers={num_workers}" if fit else f"{options[1]}={gpus:g}"
            if not fits(self._ray, cpus, 0.0):
                field = f"{options[0]}={cpus:g}"
            raise ValueError(
                f"{field}: only {fit} workers with {cpus:g} CPU cores and {gpus:g} GPUs each fit on "
                f"{available.get('CPU', 0):g} cores and {available.get('GPU', 0):g} GPUs; {num_workers or 1} must"
            )
        end_idle()
        from flower_dp.simulation.worker import Worker  # noqa: PLC0415  (imports Flower)

        self._make = self._ray.remote(Worker).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
        self.actors: list[Any] = [self._make.remote() for _ in range(num_workers or min(fit, at_most or fit))]

    def replace(self, index: int) -> None:
        """Replace an actor that has died or must end."""
        if not self._ray.is_initialized():
            return  # Ray has ended, and a new actor would start it again
        self._ray.kill(self.actors[index])
        self.actors[index] = self._make.remote()

    def have_room(self) -> bool:
        """Return whether the machines that still run have room for all workers."""
        return fits(self._ray, *self._needs) >= len(self.actors)

    def failure(self, ready: Any) -> str:
        """Return the reason why an actor could not start, or "" if it started; `ready` is its finished `__ray_ready__` call."""
        try:
            self._ray.get(ready)
        except Exception as error:  # for example a machine that lacks this package
            return last_line(str(error))
        return ""

    def close(self) -> None:
        """End all actors. Those of an earlier Ray have ended with it."""
        if self._ray.is_initialized() and session_of(self._ray) == self._session:
            for actor in self.actors:
                self._ray.kill(actor)
        self.actors = []


def room(ray_address: str, gpus: float) -> int:
    """Return the number of one-core workers that fit on a cluster. This process joins the cluster, checks it, and leaves it.

    Args:
        ray_address: address, see `address_of`.
        gpus: GPUs of a worker.

    Raises:
        ValueError: if a machine has other versions.
        ConnectionError: if no cluster answers, or this process can't join it.
        ImportError: if Ray is not installed.
    """
    ray = start_ray(0, cluster=Cluster(address=address_of(ray_address)))
    try:
        check_machines(ray, 1.0, gpus)
        return fits(ray, 1.0, gpus)
    finally:
        stop_ray()


@contextmanager
def warm_workers(*, cpus: float, gpus: float, at_most: int | None, cluster: Cluster | None = None) -> Iterator[Workers]:
    """Lend the workers of the last run if they still run and are of this kind, else new ones.

    An interruption ends the workers, and Ray if this process started it.
    """
    try:
        ray = start_ray(default_workers(), cluster=cluster)
        kind = session_of(ray), cpus, gpus, at_most
        if (workers := _idle.pop(kind, None)) is None:
            if cluster is not None:
                check_machines(ray, cpus, gpus)
            options = ("cpus_per_node", "gpus_per_node")
            workers = Workers(cpus=cpus, gpus=gpus, at_most=at_most, cluster=cluster, options=options)
            if not gpus:
                log_unused_gpus(ray, "gpus_per_node=1")
        try:
            yield workers
        finally:
            _idle[kind] = workers
    except KeyboardInterrupt:
        end_idle()
        stop_ray()
        raise


def end_idle() -> None:
    """End the workers that are kept for the next run."""
    while _idle:
        _idle.popitem()[1].close()


def session_of(ray: Any) -> tuple[Any, Any]:
    """Return the identity of this process's connection to Ray."""
    context = ray.get_runtime_context()
    return context.get_session_name(), context.get_job_id()


def log_unused_gpus(ray: Any, option: str) -> None:
    """Log that a run uses none of Ray's GPUs, and the option that changes that.

    Args:
        ray: Ray's module; this process has started Ray or joined a cluster.
        option: option that gives each worker a GPU.
    """
    if line := unused_gpus(ray.cluster_resources().get("GPU", 0), option):
        log.info(line, extra=SHOWN)


def unused_gpus(num_gpus: float, option: str, *, user: str = "run") -> str:
    """Return a line about unused GPUs; "" if there are no GPUs.

    Args:
        num_gpus: number of GPUs.
        option: option that gives each worker a GPU.
        user: command or run that could use the GPUs, as a noun.

    Example:
        >>> from flower_dp.simulation.workers import unused_gpus
        >>> unused_gpus(2.0, "--gpus-per-worker 1")
        '2 GPUs are not used by this run: add --gpus-per-worker 1 (docs: Simulate, On a GPU)'
    """
    if num_gpus < 1:
        return ""
    gpus = "1 GPU is" if num_gpus == 1 else f"{num_gpus:g} GPUs are"
    return f"{gpus} not used by this {user}: add {option} (docs: Simulate, On a GPU)"
