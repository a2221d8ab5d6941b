"""Tests that train in a forked process."""

import pytest
import torch

trains_after_a_fork = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch has threads for a GPU, and then no forked process can train"
)
