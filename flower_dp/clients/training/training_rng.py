"""Seeds for one client's training, and process-wide generators seeded for one client or one record."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flower_dp.clients.training.devices import is_accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Three functions of a process-wide generator that is not a `torch.Generator`."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    manual_seed: Callable[[int], Any]


def _seed_numpy(seed: int) -> None:
    np.random.seed([seed % 2**32, seed >> 32])  # noqa: NPY002 (the old global generator is the one to seed)


# The generators of the module `random`, and of the functions of `numpy.random`.
_PYTHON = Functions(get_state=random.getstate, set_state=random.setstate, manual_seed=random.seed)
_NUMPY = Functions(get_state=np.random.get_state, set_state=np.random.set_state, manual_seed=_seed_numpy)


def default_generators(device: torch.device) -> list[torch.Generator | Functions]:
    """Return torch's process-wide generators that work on a device may use: the CPU's, and the device's own.

    Raises:
        RuntimeError: if the device's generator can't be found: its draws would follow from no seed.
    """
    if not is_accelerator(device):
        return [torch.default_generator]
    module = torch.get_device_module(device)
    listed = getattr(module, "default_generators", None)
    if listed:
        return [torch.default_generator, listed[module.current_device() if device.index is None else device.index]]
    if not hasattr(module, "get_rng_state"):
        raise RuntimeError(f"device {device}: its random generator can't be found")
    # A device such as MPS, which does not list its generators.
    unlisted = Functions(get_state=module.get_rng_state, set_state=module.set_rng_state, manual_seed=module.manual_seed)
    return [torch.default_generator, unlisted]


class IsolatedRng:
    """A context in which torch's process-wide generators follow from one seed, for dropout for example.

    Entering again resumes the random sequence where it stopped. On leaving, the generators are as they were before.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._lent = default_generators(device)
        self._seed = seed
        self._kept: list[Any] = []

    @classmethod
    def of_data_sets(cls, device: torch.device) -> "IsolatedRng":
        """Return a context for all generators of a data set, NumPy's and Python's included; call `restart` for every record."""
        draws = cls(device, 0)
        draws._lent += [_NUMPY, _PYTHON]
        return draws

    def restart(self, seed: int) -> None:
        """Start the random sequence of another seed, within the context."""
        for generator in self._lent:
            generator.manual_seed(seed)

    def __enter__(self) -> None:
        inside, self._kept = self._kept, [generator.get_state() for generator in self._lent]
        if inside:
            self._set(inside)
        else:
            self.restart(self._seed)

    def __exit__(self, *_: object) -> None:
        outside, self._kept = self._kept, [generator.get_state() for generator in self._lent]
        self._set(outside)

    def _set(self, states: list[Any]) -> None:
        for generator, state in zip(self._lent, states, strict=True):
            generator.set_state(state)


def draws_seed(seed: int) -> int:
    """Return the seed for all draws except the order of records, for which `seed` itself is used."""
    return _hashed(f"{seed}/draws")


def record_seed(seed: int, position: int) -> int:
    """Return the seed for the draws of one record: no other record, whatever it draws, changes them."""
    return _hashed(f"{seed}/record/{position}")


def batch_seed(seed: int, server_round: int, client: str) -> int:
    """Return the seed for the order of one client's records in one round, the same on any node."""
    return _hashed(f"{seed}/{server_round}/{client}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
