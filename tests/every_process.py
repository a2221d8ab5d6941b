"""What every process that runs tests has: repeatable chance and property tests, a clock, and less work that no test needs."""

import gc
import logging
import time
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, settings

from flower_dp.privacy import accounting
from flower_dp.running import modules, plot
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


# A hundred times that of a statement: what it gives is an upper bound as well, a little larger.
_COARSE = 1e-2
_exact = accounting._least
_least = _exact.__wrapped__
_coarse = lru_cache(maxsize=None)(lambda leaves, delta, relation, grid: _least(leaves, delta, relation, max(grid, _COARSE)))
_drawn = plot.png


def _not_drawn(rows):
    return b"not drawn"


def _set(clock=time, least=_exact, png=_drawn):
    """Set what the package uses in this process; return what it used before."""
    before = client_query.time, accounting._least, plot.png
    client_manager.time = client_query.time = clock
    accounting._least, plot.png = least, png
    return before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Most tests need an epsilon that bounds, not all of its digits, and no picture: see the markers `exact` and `drawn`."""
    level = _LOG.level
    before = _set(
        time if item.get_closest_marker("flwr_run") else Clock(),
        _exact if item.get_closest_marker("exact") else _coarse,
        _drawn if item.get_closest_marker("drawn") else _not_drawn,
    )
    with chance_of(item.nodeid):
        try:
            return (yield)
        finally:
            _set(*before)
            if _LOG.level != level:  # a program that a test runs may have changed it
                _LOG.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is the same whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    before = _set()
    with chance_of(f"{fixturedef.baseid} {fixturedef.argname}"):
        try:
            return (yield)
        finally:
            _set(*before)


@pytest.fixture(autouse=True)
def no_app_of_an_earlier_test():
    """An app whose ServerApp was loaded has its folder on the path, until another one is loaded."""
    yield
    for place, _ in list(modules._served):
        modules.forget(place.folder)


@pytest.fixture
def clock():
    """The clock of a strategy that waits for its clients: a grid in the test's own process answers at once, or never."""
    return client_query.time


def pytest_collection_finish():
    # pytest gives every logger that does not propagate its handlers, six times a test; torch has forty of them.
    for name, one in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(one, logging.Logger):
            one.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Look once for what is left behind: pytest and Python would each look several times, in every process."""
    gc.collect()
    gc.freeze()
