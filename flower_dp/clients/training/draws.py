"""Seeds for one client's training, and process-wide generators seeded for one client or one record."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

from flower_dp.clients.training.devices import Functions, Generator, default_generators


def _seed_numpy(seed: int) -> None:
    np.random.seed([seed % 2**32, seed >> 32])  # noqa: NPY002 (it is that one which is seeded)


# Of the module `random`, and of the functions of `numpy.random`.
_PYTHON = Functions(get_state=random.getstate, set_state=random.setstate, manual_seed=random.seed)
_NUMPY = Functions(get_state=np.random.get_state, set_state=np.random.set_state, manual_seed=_seed_numpy)


class OwnDraws:
    """A context in which torch's process-wide generators follow from one seed, for dropout for example.

    Entering again resumes the random sequence where it stopped. On leaving, the generators are as they were before.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._lent: list[Generator] = default_generators(device)
        self._seed = seed
        self._kept: list[Any] = []

    @classmethod
    def of_data_sets(cls, device: torch.device) -> "OwnDraws":
        """Return a context for whatever a data set may draw from, NumPy and Python included; call `restart` for every record."""
        draws = cls(device, 0)
        draws._lent += [_NUMPY, _PYTHON]
        return draws

    def restart(self, seed: int) -> None:
        """Start the random sequence of another seed, within the context."""
        for generator in self._lent:
            generator.manual_seed(seed)

    def __enter__(self) -> None:
        outside = [generator.get_state() for generator in self._lent]
        for index, generator in enumerate(self._lent):
            if self._kept:
                generator.set_state(self._kept[index])
            else:
                generator.manual_seed(self._seed)
        self._kept = outside

    def __exit__(self, *_: object) -> None:
        inside = [generator.get_state() for generator in self._lent]
        for generator, state in zip(self._lent, self._kept, strict=True):
            generator.set_state(state)
        self._kept = inside


def draws_seed(seed: int) -> int:
    """Return the seed for all draws except the order of records, for which `seed` itself is used."""
    digest = hashlib.blake2b(f"{seed}/draws".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def record_seed(seed: int, position: int) -> int:
    """Return the seed for the draws of one record: no other record changes them, whatever it draws itself."""
    digest = hashlib.blake2b(f"{seed}/record/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def batch_seed(seed: int, server_round: int, client: str) -> int:
    """Return the seed for the order of one client's records in one round, the same on any node."""
    digest = hashlib.blake2b(f"{seed}/{server_round}/{client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
