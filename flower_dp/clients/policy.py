"""A client's own policy: the instructions that it accepts from any server."""

from dataclasses import dataclass
from typing import Protocol

from flower_dp.core import checks
from flower_dp.wire import Instruction


class ClientNoise(Protocol):
    """The noise that a client adds to its own row: that of a pipeline, or of a method's table."""

    @property
    def noise_std(self) -> float:
        """Standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPolicy:
    """Limits that a client sets for its own protection; instructions beyond them are refused.

    Attributes:
        max_clip_norm: largest clip norm to work with; None for any.
        min_noise_multiplier: smallest noise multiplier that the server must promise for the whole release.
        min_noise_std: smallest std of the noise that this client itself adds; if > 0, instructions with less noise on the device
            are refused.
        allow_metrics: whether training metrics may be sent when the server asks for them; they are not private.
        min_evaluation_noise_multiplier: smallest noise multiplier that the server must promise for a private evaluation.

    Example:
        >>> from flower_dp.clients import ClientPolicy
        >>> from flower_dp.wire import Instruction
        >>> policy = ClientPolicy(max_clip_norm=1.0, min_noise_multiplier=0.8)
        >>> policy.check(Instruction(server_round=1, method="dp-fedavg", clients=("a",), clip_norm=1.0, noise_multiplier=0.5))
        Traceback (most recent call last):
            ...
        ValueError: noise_multiplier=0.5: this client's policy asks for 0.8
    """

    max_clip_norm: float | None = None
    min_noise_multiplier: float = 0.0
    min_noise_std: float = 0.0
    allow_metrics: bool = False
    min_evaluation_noise_multiplier: float = 0.0

    def __post_init__(self) -> None:
        if self.max_clip_norm is not None:
            checks.number("max_clip_norm", self.max_clip_norm, above=0)
        checks.number("min_noise_multiplier", self.min_noise_multiplier, at_least=0)
        checks.number("min_noise_std", self.min_noise_std, at_least=0)
        checks.number("min_evaluation_noise_multiplier", self.min_evaluation_noise_multiplier, at_least=0)

    def check(self, instruction: Instruction) -> None:
        """Refuse an instruction that this policy does not allow.

        Raises:
            ValueError: naming the limit and the value asked for.
        """
        if self.max_clip_norm is not None and instruction.clip_norm > self.max_clip_norm:
            raise ValueError(f"clip_norm={instruction.clip_norm:g}: this client's policy allows at most {self.max_clip_norm:g}")
        if instruction.noise_multiplier < self.min_noise_multiplier:
            raise ValueError(
                f"noise_multiplier={instruction.noise_multiplier:g}: this client's policy asks for {self.min_noise_multiplier:g}"
            )

    def check_evaluation(self, instruction: Instruction, noise: ClientNoise) -> None:
        """Refuse a private evaluation with less noise than this policy needs, in all or on the device.

        Raises:
            ValueError: naming the limit and the value asked for.
        """
        if instruction.noise_multiplier < self.min_evaluation_noise_multiplier:
            raise ValueError(
                f"noise_multiplier={instruction.noise_multiplier:g} of an evaluation: this client's policy asks for "
                f"{self.min_evaluation_noise_multiplier:g}"
            )
        if self.min_noise_std and not noise.noise_std:
            raise ValueError("noise_std=0 of an evaluation: this client's policy asks for noise on the device")

    def check_noise(self, noise: ClientNoise) -> None:
        """Refuse an instruction under which this client would add less noise itself than this policy needs.

        Raises:
            ValueError: naming the limit and the value asked for.
        """
        if noise.noise_std < self.min_noise_std:
            raise ValueError(f"noise_std={noise.noise_std:g}: this client's policy asks for {self.min_noise_std:g}")
