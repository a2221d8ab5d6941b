"""The table of a method inside an instruction."""

from dataclasses import dataclass

import numpy as np

from flower_dp.core import checks
from flower_dp.core.compression import MOST_LEVELS, random_mask
from flower_dp.wire.instruction import Instruction
from flower_dp.wire.text import check_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLevelOrder:
    """The table of a method with one noised sum of clipped updates.

    Attributes:
        placement: who adds the noise: `central`, the server; `distributed`, each client its share.
        noise_std: standard deviation of the share that each client adds to its own clipped update; 0 when the server adds it.
        keep_ratio: part of the coordinates that every client sends after its noise; 1 sends all.
        quantization_levels: levels above 0 to which every client rounds its noised update; 0 for no quantisation.

    Example:
        >>> from flower_dp.wire import ClientLevelOrder
        >>> ClientLevelOrder(placement="distributed", noise_std=0.05).keep_ratio
        1.0
    """

    placement: str
    noise_std: float = 0.0
    keep_ratio: float = 1.0
    quantization_levels: int = 0

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, ("central", "distributed"))
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.integer("quantization_levels", self.quantization_levels, at_least=0, at_most=MOST_LEVELS)
        if self.placement == "central" and (self.noise_std or self.keep_ratio != 1 or self.quantization_levels):
            raise ValueError(
                f"noise_std={self.noise_std:g}, keep_ratio={self.keep_ratio:g}, quantization_levels={self.quantization_levels}: "
                "must be 0, 1 and 0 for placement='central', where the server adds the noise and chooses the coordinates"
            )

    @classmethod
    def of(cls, instruction: Instruction) -> "ClientLevelOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, or values that make no sense; or if clients are to add noise and it has none.
        """
        check_keys(instruction.method, instruction.order, ("placement", "noise_std", "keep_ratio", "quantization_levels"))
        order = cls(**instruction.order)
        _check_share(order.placement, order.noise_std, instruction)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class FedSMPOrder:
    """The table of Fed-SMP with rand_k: one noised sum of updates under a random mask that all clients of a round share.

    Attributes:
        placement: who adds the noise: `central`, the server; `distributed`, each client its share.
        noise_std: standard deviation of the share that each client adds to its own masked and clipped update; 0 when the server
            adds it.
        keep_ratio: part of the coordinates that the mask keeps; independent of data, so free under either placement.
        mask_seed: public; the mask is `random_mask(length, keep_ratio, numpy.random.default_rng(mask_seed))`.

    Example:
        >>> from flower_dp.wire import FedSMPOrder
        >>> len(FedSMPOrder(placement="central", keep_ratio=0.05, mask_seed=7).mask(1000))
        50
    """

    placement: str
    noise_std: float = 0.0
    keep_ratio: float
    mask_seed: int

    def __post_init__(self) -> None:
        checks.one_of("placement", self.placement, ("central", "distributed"))
        checks.number("noise_std", self.noise_std, at_least=0)
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.integer("mask_seed", self.mask_seed, at_least=0, at_most=2**63 - 1)
        if self.placement == "central" and self.noise_std:
            raise ValueError(f"noise_std={self.noise_std:g}: must be 0 for placement='central', where the server adds the noise")

    def mask(self, length: int) -> np.ndarray:
        """Return the indices that everyone keeps this round, increasing."""
        return random_mask(length, self.keep_ratio, np.random.default_rng(self.mask_seed))

    @classmethod
    def of(cls, instruction: Instruction) -> "FedSMPOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, or values that make no sense; or if clients are to add noise and it has none.
        """
        check_keys(instruction.method, instruction.order, ("placement", "noise_std", "keep_ratio", "mask_seed"))
        order = cls(**instruction.order)
        _check_share(order.placement, order.noise_std, instruction)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOrder:
    """The table of a method whose every message is private on its own; each tuple has one entry a client.

    Attributes:
        weights: what each client's private row counts in the node's sum.
        terms: what the server takes each client's own terms to be (`Terms.kind`). A client compares them with its own, and
            never works by them.
        noise_multipliers: the noise multipliers that go with them, by which the server charges.

    Example:
        >>> from flower_dp.wire import LocalOrder
        >>> LocalOrder(weights=(1.0, 2.0), terms=("gaussian", "gaussian"), noise_multipliers=(4.0, 4.0)).weights
        (1.0, 2.0)
    """

    weights: tuple[float, ...]
    terms: tuple[str, ...]
    noise_multipliers: tuple[float, ...]

    def __post_init__(self) -> None:
        for weight in self.weights:
            checks.number("weights", weight, at_least=0)
        if not all(isinstance(kind, str) for kind in self.terms):
            raise ValueError("terms: must be texts")
        for multiplier in self.noise_multipliers:
            checks.number("noise_multipliers", multiplier, at_least=0)

    @classmethod
    def of(cls, instruction: Instruction) -> "LocalOrder":
        """Read the table of an instruction.

        Raises:
            ValueError: if it has other keys, lists of another length, or values that make no sense.
        """
        names = ("weights", "terms", "noise_multipliers")
        check_keys(instruction.method, instruction.order, names)
        for name in names:
            values = instruction.order[name]
            if not isinstance(values, list | tuple) or len(values) != len(instruction.clients):
                raise ValueError(f"{name}: must have one value for each of {len(instruction.clients)} clients")
        return cls(**{name: tuple(instruction.order[name]) for name in names})


def _check_share(placement: str, noise_std: float, instruction: Instruction) -> None:
    if placement == "distributed" and bool(noise_std) != bool(instruction.noise_multiplier):
        raise ValueError(
            f"noise_std={noise_std:g}: does not go with noise_multiplier={instruction.noise_multiplier:g} under "
            "placement='distributed'"
        )
