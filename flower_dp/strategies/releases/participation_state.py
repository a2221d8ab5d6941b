"""The secret state of a run whose clients keep a minimum separation: who took part, and the seeds of its correlated noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from flower_dp.core.noise import Generator, noise_generator
from flower_dp.core.participation import Participation
from flower_dp.core.serialization import register_serializable
from flower_dp.core.strategy_matrix import Buffers, StrategyMatrix

# The part of the variance of each draw that a second, smaller draw has: it fills the gaps between the doubles of the first one.
_SMALL = 2.0**-12
# The sum of the bits of all draws is compared modulo this.
_CHECKSUM = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParticipationState:
    """Participations and noise so far. Who knows this state can subtract the noise from every model.

    It is on the disk before the messages of a round leave. The buffers are not: the seeds determine them. A resumed run draws the
    noise of earlier rounds again, and a checksum tells if it does. Each round has a new seed, so that no two copies of a state
    ever draw the same noise for a new round.

    Attributes:
        past: participations by client name.
        seeds: secret seed of each round's noise, 256 bits; empty for independent noise.
        checksum: checksum of all draws.
        buffers: rows from which the next noise is made; None if they have to be drawn again.
    """

    past: Mapping[str, Participation] = field(default_factory=dict)
    seeds: tuple[str, ...] = field(default=(), repr=False)
    checksum: int = field(default=0, repr=False)
    buffers: Buffers | None = field(default=None, repr=False)

    def asked(self, names: tuple[str, ...], number: int) -> dict[str, Participation]:
        """Return the participations after these clients were asked in round `number`."""
        counts = {name: self.past[name].count if name in self.past else 0 for name in names}
        return {**self.past, **{name: Participation(last=number, count=count + 1) for name, count in counts.items()}}

    def row(self, matrix: StrategyMatrix, number: int, length: int, rng: Generator) -> tuple[np.ndarray, Self]:
        """Return the noise of round `number` [length], each draw with variance 1, and the state after it.

        Rounds that were charged and have not drawn are drawn now and not used: the rows of C^-1 Z stay in step with the charges.

        Args:
            matrix: strategy matrix.
            number: number of the round, from 1; above the number of seeds.
            length: length of the noise.
            rng: new generator, which makes the seeds of new rounds.

        Raises:
            RuntimeError: if the round's noise was drawn before, or the draws of earlier rounds can't be repeated.
            ValueError: if earlier rounds had another length.
        """
        drawn = len(self.seeds)
        if number <= drawn:
            raise RuntimeError(f"noise of round {number}: was drawn already; rounds 1 to {drawn} can't be drawn again")
        if any(kept.size != length for kept in self.buffers or ()):
            raise ValueError(f"noise of {length} entries: the model had another number of parameters in earlier rounds")
        seeds = (*self.seeds, *(rng.bytes(32).hex() for _ in range(number - drawn)))
        checksum, buffers, first = (0, (), 1) if self.buffers is None else (self.checksum, self.buffers, drawn + 1)
        row = np.zeros(0)
        for place in range(first, number + 1):
            draw = _Draws(noise_generator(int(seeds[place - 1], 16), "correlated", place), length)
            row, buffers = matrix.row(place, buffers, draw)
            checksum = (checksum + draw.checksum) % _CHECKSUM
            if place == drawn and checksum != self.checksum:
                raise RuntimeError(
                    f"noise of rounds 1 to {place}: NumPy {np.__version__} on this machine draws other numbers than the run did; "
                    "resume it with the version, and on the kind of machine, with which it began"
                )
        return row, type(self)(past=self.past, seeds=seeds, checksum=checksum, buffers=buffers)


class _Draws:
    """Standard Gaussian draws of one length, from one generator, with a checksum of their bits."""

    def __init__(self, rng: Generator, length: int) -> None:
        self._rng, self._length, self.checksum = rng, length, 0

    def __call__(self) -> np.ndarray:
        drawn = np.asarray(self._rng.standard_normal(self._length))
        drawn *= np.sqrt(1 - _SMALL)
        small = np.asarray(self._rng.standard_normal(self._length))
        small *= np.sqrt(_SMALL)
        drawn += small
        self.checksum = (self.checksum + int(drawn.view(np.uint64).sum(dtype=np.uint64))) % _CHECKSUM
        return drawn


def _stored(state: ParticipationState) -> dict[str, Any]:
    past = {name: (each.last, each.count) for name, each in state.past.items()}
    return {"past": past, "seeds": state.seeds, "checksum": state.checksum}


def _read(parts: Mapping[str, Any]) -> ParticipationState:
    past = {name: Participation(last=last, count=count) for name, (last, count) in parts["past"].items()}
    return ParticipationState(**{**parts, "past": past})


register_serializable(ParticipationState, _stored, _read)
