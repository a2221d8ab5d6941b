"""What all tests share: one torch thread, an order, and one `flwr run` at a time; the rest is in `tests.every_process`."""

import fcntl
import os

# Before NumPy and torch start their threads; the processes of pytest-xdist and of Flower inherit it.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest  # noqa: E402

# Files of which every test compares an epsilon with one that is published, or with its last digits; others have a marker.
_EXACT = {"test_docs.py", "test_readme.py"}


def pytest_configure(config):
    """Import what runs tests, and with it torch; the process that hands them out to others needs nothing of it."""
    hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("tests.every_process")


def _runs_beside(item):
    return any(item.get_closest_marker(name) for name in ("deployment", "wheel"))


def pytest_collection_modifyitems(config, items):
    """Order the tests so that those that start Flower begin first: deployment and wheel in one process, all others in another.

    What fails in them may be the machine: they may fail once, and the summary says so.

    With --dist worksteal the first of n processes begins with the first of n equal parts of this list, the second with the second.
    When a process has nothing left, it takes tests from the end of another's part.
    """
    for item in items:
        if item.path.name in _EXACT:
            item.add_marker("exact")
        if item.get_closest_marker("flwr_run") and not _runs_beside(item):
            item.fixturenames.insert(0, "one_flwr_run_at_a_time")
    items.sort(key=lambda item: item.get_closest_marker("flwr_run") is None)
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if item.get_closest_marker("flwr_run"):
                item.add_marker(pytest.mark.flaky(reruns=1))
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_processes > 1:
        beside = [item for item in items if _runs_beside(item)]
        others = [item for item in items if not _runs_beside(item)]
        second = len(items) // num_processes
        items[:] = others[:second] + beside + others[second:]


@pytest.fixture
def one_flwr_run_at_a_time(request, tmp_path_factory):
    """Hold a lock that the processes of pytest-xdist share while a simulation of Flower or Ray runs.

    The deployment and the wheel run beside all others.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own
    with (shared / "flwr.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
