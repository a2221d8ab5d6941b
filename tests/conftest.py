"""What all tests share: one torch thread, repeatable chance and property tests, and one `flwr run` at a time."""

import fcntl
import gc
import logging
import os
from functools import lru_cache

# Before NumPy and torch start their threads; the processes of pytest-xdist and of Flower inherit it.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from flower_dp.clients import FlatModel  # noqa: E402
from flower_dp.privacy import accounting  # noqa: E402
from flower_dp.running import plot  # noqa: E402
from flower_dp.strategies.population import client_manager, client_query  # noqa: E402
from tests.chance import chance_of  # noqa: E402
from tests.clock import Clock  # noqa: E402

# What is there when the tests begin stays, and the collector need not look at it again and again.
gc.disable()
_LOG = logging.getLogger("flwr")
torch.set_num_threads(1)
# How long an example takes to draw is the machine's.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    level = _LOG.level
    with chance_of(item.nodeid):
        try:
            return (yield)
        finally:
            if _LOG.level != level:  # a program that a test runs may have changed it
                _LOG.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is the same whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with chance_of(f"{fixturedef.baseid} {fixturedef.argname}"):
        return (yield)


@pytest.fixture(autouse=True)
def clock(request, monkeypatch):
    """The clock of a strategy that waits for its clients: a grid in the test's own process answers at once, or never."""
    if request.node.get_closest_marker("flwr_run"):
        return None
    made = Clock()
    for module in (client_manager, client_query):
        monkeypatch.setattr(module, "time", made)
    return made


# What a model of these makes of a record is told by how they are written.
_STOCK = (torch.nn.Sequential, torch.nn.Flatten, torch.nn.Linear, torch.nn.ReLU, torch.nn.Tanh)
# What made-up records say of a model: keys of `FlatModel.programs`.
_SAID = ("fits", "trained", "joins")
_said: dict[object, object] = {}


def _is_stock(layer):
    """Whether a layer is one of torch's own, and nobody has changed what it does."""
    return type(layer) in _STOCK and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


class _Programs(dict):
    """What is kept of a model; what made-up records say of a stock one is found out once a process for all that are alike."""

    def __init__(self, model):
        super().__init__()
        self._model = model

    def __reduce__(self):
        return dict, (dict(self),)  # of a copy of the model

    def _shared(self, key):
        module = self._model.module
        # "test": of a computation of the test's own
        if key[0] not in _SAID or key[1] == "test" or not all(map(_is_stock, module.modules())):
            return None
        return (repr(module), str(self._model.device), key)

    def __contains__(self, key):
        return super().__contains__(key) or self._shared(key) in _said

    def __getitem__(self, key):
        return super().__getitem__(key) if super().__contains__(key) else _said[self._shared(key)]

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if (shared := self._shared(key)) is not None:
            _said[shared] = value


_flat = FlatModel.__init__


@pytest.fixture(autouse=True)
def stock_models_are_examined_once(monkeypatch):
    """Many clients of these tests have a stock model each."""

    def init(self, *arguments, **keywords):
        _flat(self, *arguments, **keywords)
        self.programs = _Programs(self)

    monkeypatch.setattr(FlatModel, "__init__", init)


# A hundred times that of a statement: what it gives is an upper bound as well, a little larger.
_COARSE = 1e-2
_least = accounting._least.__wrapped__
_coarse = lru_cache(maxsize=None)(lambda leaves, delta, relation, grid: _least(leaves, delta, relation, max(grid, _COARSE)))
# Folders and files of which every test compares an epsilon with one that is published, or with its last digits; others have a marker.
_EXACT = {"flower_dp", "test_docs.py", "test_readme.py"}


@pytest.fixture(autouse=True)
def bounds_and_pictures_take_little_work(request, monkeypatch):
    """Most tests need an epsilon that bounds, not all of its digits, and no picture: see the markers `exact` and `drawn`."""
    if request.node.get_closest_marker("exact") is None:
        monkeypatch.setattr(accounting, "_least", _coarse)
    if request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(plot, "png", lambda rows: b"not drawn")


def _runs_beside(item):
    return any(item.get_closest_marker(name) for name in ("deployment", "wheel"))


def pytest_collection_modifyitems(config, items):
    """Order the tests so that those that start Flower begin first: deployment and wheel in one process, all others in another.

    What fails in them may be the machine: they may fail once, and the summary says so.

    With --dist worksteal the first of n processes begins with the first of n equal parts of this list, the second with the second.
    When a process has nothing left, it takes tests from the end of another's part.
    """
    for item in items:
        if _EXACT.intersection(item.path.relative_to(config.rootpath).parts):
            item.add_marker("exact")
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


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Look once for what is left behind: pytest and Python would each look several times, in every process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_flwr_run_at_a_time(request, tmp_path_factory):
    """Hold a lock that the processes of pytest-xdist share while a simulation of Flower or Ray runs.

    The deployment and the wheel run beside all others.
    """
    if request.node.get_closest_marker("flwr_run") is None or _runs_beside(request.node):
        yield
        return
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own
    with (shared / "flwr.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
