"""Seeds for one client's training, and torch's own generators seeded for one client."""

import hashlib

import torch


class OwnDraws:
    """A context in which torch's process-wide generators follow from one seed, for dropout for example.

    Entering again resumes the random sequence where it stopped. On leaving, the generators are as they were before.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        # The generators of every device that has its own; the CPU's are used besides a GPU's.
        others = None if device.type == "cpu" else getattr(torch.get_device_module(device), "default_generators", None)
        self._lent: list[torch.Generator] = [torch.default_generator, *([others[device.index]] if others else [])]
        self._seed = seed
        self._kept: list[torch.Tensor] = []

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


def batch_seed(seed: int, server_round: int, client: str) -> int:
    """Return the seed for the order of one client's records in one round, the same on any node."""
    digest = hashlib.blake2b(f"{seed}/{server_round}/{client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
