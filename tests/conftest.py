"""What all tests share: one torch thread, and property tests that try the same examples every time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("repeatable")
