"""What every process that runs tests has: repeatable chance and property tests, a clock, and less work that no test needs."""

import gc
import logging
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, settings

from flower_dp.privacy import accounting
from flower_dp.running import plot
from flower_dp.strategies.population import client_manager, client_query
from tests.chance import chance_of
from tests.clock import Clock

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


# A hundred times that of a statement: what it gives is an upper bound as well, a little larger.
_COARSE = 1e-2
_least = accounting._least.__wrapped__
_coarse = lru_cache(maxsize=None)(lambda leaves, delta, relation, grid: _least(leaves, delta, relation, max(grid, _COARSE)))


@pytest.fixture(autouse=True)
def bounds_and_pictures_take_little_work(request, monkeypatch):
    """Most tests need an epsilon that bounds, not all of its digits, and no picture: see the markers `exact` and `drawn`."""
    if request.node.get_closest_marker("exact") is None:
        monkeypatch.setattr(accounting, "_least", _coarse)
    if request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(plot, "png", lambda rows: b"not drawn")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Look once for what is left behind: pytest and Python would each look several times, in every process."""
    gc.collect()
    gc.freeze()
