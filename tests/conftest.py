"""What all tests share: one torch thread, repeatable property tests, and one `flwr run` at a time."""

import fcntl
import os

# Before NumPy and torch start their threads; the processes of pytest-xdist and of Flower inherit it.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(config, items):
    """Order the tests so that those that start Flower begin first: the deployment in one process, all others in another.

    With --dist worksteal the first of n processes begins with the first of n equal parts of this list, the second with the second.
    When a process has nothing left, it takes tests from the end of another's part.
    """
    items.sort(key=lambda item: item.get_closest_marker("flwr_run") is None)
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_processes > 1:
        deployments = [item for item in items if item.get_closest_marker("deployment")]
        others = [item for item in items if item not in deployments]
        second = len(items) // num_processes
        items[:] = others[:second] + deployments + others[second:]


@pytest.fixture(autouse=True)
def one_flwr_run_at_a_time(request, tmp_path_factory):
    """Hold a lock that the processes of pytest-xdist share while a simulation of Flower or Ray runs."""
    if request.node.get_closest_marker("flwr_run") is None or request.node.get_closest_marker("deployment"):
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "flwr.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
