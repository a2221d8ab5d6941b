"""Ray on this machine, and the actors on it that run ClientApps. Both stay from one simulation to the next."""

import atexit
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from flower_dp.core import checks

# What Ray reads when it starts.
ENVIRONMENT = {
    # Ray starts workers at niceness 15, so other programs would take the cores from the training.
    "RAY_worker_niceness": "0",
    # Messages of up to 4 MiB go directly to the worker, not through Ray's object store.
    "RAY_max_direct_call_object_size": str(2**22),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise Ray looks for a `uv run` among the parents of this process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# Everything listens on this machine's own address only: Ray asks nobody for a password.
_ADDRESS = "127.0.0.1"

_lock = threading.Lock()
_folder: Path | None = None


def default_workers() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_ray(num_cpus: int, folder: Path | None = None) -> Any:
    """Start Ray on this machine, unless it runs in this process already, and return its module.

    Args:
        num_cpus: how many workers of one core may run at once.
        folder: where Ray puts its sockets and logs; None for a new one, which is removed with Ray.

    Raises:
        ImportError: Ray is not installed.
    """
    global _folder  # noqa: PLW0603  (there is one Ray in a process)
    if importlib.util.find_spec("ray") is None:
        raise ImportError("Ray is not installed: pip install 'flower-dp[simulation]'", name="ray")
    import ray  # noqa: PLC0415  (a third of a second)

    with _lock:
        if ray.is_initialized():
            return ray
        if folder is None:
            folder = _folder = short_folder()
        if threading.current_thread() is threading.main_thread():
            _init(ray, num_cpus, folder)
        else:
            _init_in_a_lasting_thread(ray, num_cpus, folder)
        atexit.register(stop_ray)
        return ray


def _init_in_a_lasting_thread(ray: Any, num_cpus: int, folder: Path) -> None:
    """Start Ray in a thread that never ends: on Linux its processes end with the thread that has started them."""
    started, errors = threading.Event(), []

    def start_and_stay() -> None:
        try:
            _init(ray, num_cpus, folder)
        except BaseException as error:
            errors.append(error)
            started.set()
            return
        started.set()
        threading.Event().wait()

    threading.Thread(target=start_and_stay, name="Ray", daemon=True).start()
    started.wait()
    if errors:
        raise errors[0]


def _init(ray: Any, num_cpus: int, folder: Path) -> None:
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "PYTHONPATH")}
    paths = [str(Path(place).absolute()) for place in sys.path if Path(place).is_dir()]
    os.environ |= ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints on future releases of Ray
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.ERROR,
                _node_ip_address=_ADDRESS,
                _temp_dir=str(folder),
            )
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def stop_ray() -> None:
    """End the Ray that `start_ray` has started, with all its workers; a Ray of somebody else goes on."""
    global _folder  # noqa: PLW0603
    with _lock:
        if _folder is None:
            return
        import ray  # noqa: PLC0415

        ray.shutdown()
        for _ in range(30):  # Ray's processes write into it until they have ended
            shutil.rmtree(_folder, ignore_errors=True)
            if not _folder.exists():
                break
            time.sleep(0.1)
        _folder = None
        atexit.unregister(stop_ray)


def short_folder() -> Path:
    """Return a new temporary folder with a short name: a socket's path has at most 103 characters on macOS, 107 on Linux."""
    parent = tempfile.gettempdir()
    if len(parent) > 12 and os.access("/tmp", os.W_OK):  # noqa: S108
        parent = "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="flower-dp-", dir=parent))


class Workers:
    """Actors of one kind, each of which runs a ClientApp for one node at a time; a dead one can be replaced.

    Args:
        num_workers: how many; None for as many as fit on this machine, but no more than `at_most`.
        cpus: CPU cores of each; torch uses as many threads.
        gpus: the fraction of a GPU that each gets; with 0 it sees no GPU.

    Raises:
        ValueError: they do not fit on this machine.
        ImportError: Ray is not installed.
    """

    def __init__(
        self, *, num_workers: int | None = None, cpus: float = 1.0, gpus: float = 0.0, at_most: int | None = None
    ) -> None:
        if num_workers is not None:
            checks.integer("num_workers", num_workers, at_least=1)
        checks.number("cpus", cpus, above=0)
        checks.number("gpus", gpus, at_least=0)
        self._ray = start_ray(max(default_workers(), num_workers or 0))
        fit = self._capacity(cpus, gpus)
        if fit < (num_workers or 1):
            there = self._ray.cluster_resources()
            raise ValueError(
                f"num_workers={num_workers or 1}: only {fit} workers with {cpus:g} CPU cores and {gpus:g} GPUs each fit on "
                f"{there.get('CPU', 0):g} cores and {there.get('GPU', 0):g} GPUs"
            )
        self._make = self._ray.remote(_worker_class()).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
        self.actors: list[Any] = [self._make.remote() for _ in range(num_workers or min(fit, at_most or fit))]

    def replace(self, index: int) -> None:
        """Put a new actor in the place of one that has died, or that is to be ended."""
        if not self._ray.is_initialized():
            return  # Ray is gone, and would start again
        self._ray.kill(self.actors[index])
        self.actors[index] = self._make.remote()

    def close(self) -> None:
        """End all actors."""
        if self._ray.is_initialized():
            for actor in self.actors:
                self._ray.kill(actor)
        self.actors = []

    def _capacity(self, cpus: float, gpus: float) -> int:
        """Return how many fit, machine by machine."""
        total = 0
        for node in self._ray.nodes():
            has = node["Resources"]
            # A GPU is never shared by fractions of two.
            shares = int(has.get("GPU", 0)) * int(1 / gpus) if 0 < gpus <= 1 else int(has.get("GPU", 0) / gpus) if gpus else None
            of_cpus = int(has.get("CPU", 0) / cpus)
            total += of_cpus if shares is None else min(of_cpus, shares)
        return total


def _worker_class() -> type:
    from flower_dp.simulation.worker import Worker  # noqa: PLC0415  (imports Flower)

    return Worker
