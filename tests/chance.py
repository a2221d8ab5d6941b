"""Chance that is the same whenever a test runs, on every machine and in any order.

What the package asks the operating system for, and torch's and Python's own generators, follow from the name of the test. So a
statistical test can't fail by chance where it has passed before. `TEST_SEED=3 pytest` draws something else, which is as repeatable;
`TEST_SEED=fresh` leaves the operating system's entropy as it is.
"""

import os
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SEED = os.environ.get("TEST_SEED", "0")
_RANDBITS = secrets.randbits


def _leave_to_the_system() -> None:
    secrets.randbits = _RANDBITS


# A process that a test forks would draw what its parent draws.
os.register_at_fork(after_in_child=_leave_to_the_system)


@contextmanager
def chance_of(name: str) -> Iterator[None]:
    """Let all that is drawn in the block follow from a name; what was drawn before it goes on afterwards."""
    if SEED == "fresh":
        yield
        return
    own = random.Random(f"{SEED} {name}")
    before, of_python, of_torch = secrets.randbits, random.getstate(), torch.get_rng_state()
    secrets.randbits = own.getrandbits
    random.seed(own.getrandbits(64))
    torch.default_generator.manual_seed(own.getrandbits(63))
    try:
        yield
    finally:
        secrets.randbits = before
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
