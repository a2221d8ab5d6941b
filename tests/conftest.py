"""What all tests share: one torch thread, repeatable property tests, and one `flwr run` at a time."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("flwr_run"):
            item.add_marker(pytest.mark.xdist_group("flwr"))
