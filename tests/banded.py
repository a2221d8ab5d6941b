"""Noise that is correlated over rounds, as a part of a noised sum, and a strategy with it: what no method has yet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, NoOpDpEvent

from flower_dp.core import noise
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import RoundRobinSampling
from flower_dp.privacy.release import Release
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases.clipped_updates import ClippedUpdates
from flower_dp.strategies.run_state import RunState
from flower_dp.strategies.strategy import DPStrategy

BANDED = "banded"


@dataclass(frozen=True, slots=True)
class Drawn:
    """The noise of a round [d], and the noises of the rounds before it from which it was made, the latest first."""

    number: int
    noise: np.ndarray
    before: np.ndarray | None


class Witness(list[Drawn]):
    """One for a strategy and all its copies."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Banded:
    """Noise C^-1 Z for a banded Toeplitz matrix C, where every client has its turns at least a band apart.

    Its state is the noise of the last rounds: who knows it knows what the next noise subtracts. One event is that of the whole run,
    since the columns of C that one client meets do not overlap. Source: Choquette-Choo et al. 2023, section 4.

    Attributes:
        release: the noised sum; its noise multiplier is that of Z.
        band: c_1, c_2, ... of C, whose diagonal is 1.
        num_turns: of a client in the run.
        witness: of what was drawn, for tests.
    """

    release: Release
    band: tuple[float, ...]
    num_turns: int
    witness: Witness = field(default_factory=Witness, compare=False, repr=False)
    placement: ClassVar[str] = "central"
    compresses_noised_updates: ClassVar[bool] = False
    cohort_is_secret: ClassVar[bool] = False

    @property
    def promised_multiplier(self) -> float:
        return self.release.mechanism.noise_multiplier

    def with_clip_norm(self, clip_norm: float) -> Self:
        return self

    def share_std(self, cohort_size: int) -> float:
        return 0.0

    def events(self, number: int, cohort_size: int) -> Mapping[str, DpEvent]:
        column = math.sqrt(self.num_turns * (1 + sum(part**2 for part in self.band)))
        whole = GaussianDpEvent(self.release.mechanism.noise_multiplier / column)
        return dict.fromkeys(("", "outsiders"), whole if number == 1 else NoOpDpEvent())

    def begin(self, state: Any, number: int, length: int, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
        before = np.zeros((len(self.band), length)) if state is None else state
        drawn = self.release.noise_scale * rng.standard_normal(length) - np.asarray(self.band) @ before
        self.witness.append(Drawn(number, drawn, state))
        return drawn, np.concatenate([drawn[None], before[:-1]])

    def add(self, total: np.ndarray, begun: Any, *, step: float, num_replies: int, cohort_size: int, rng: Generator) -> None:
        total += noise.round_to_nearest(begun, step)


class BandedRules(ClientLevelRules):
    """The model moves by the noised sum of the two of four clients whose turn it is; the noise is for so many rounds."""

    def __init__(self, *, num_rounds: int, noise_multiplier: float) -> None:
        sampling, central = RoundRobinSampling(cohort_size=2), {"placement": "central", "server_completes_noise": True}
        updates = ClippedUpdates(clip_norm=1.0, sampling=sampling, num_clients=4, relation=None, min_reply_ratio=None, **central)
        super().__init__(BANDED, "Banded", updates, noise_multiplier, delta=1e-3)
        banded = Banded(release=self.release, band=(0.5,), num_turns=num_rounds // 2)
        self.training, self.last = replace(self.training, noise=banded), num_rounds

    def stop_reason(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        return "its noise is for fewer rounds" if self.num_rounds(state.charges) >= self.last else None


class BandedStrategy(DPStrategy):
    """A run of those rules."""

    def __init__(self, *, num_rounds: int = 8, noise_multiplier: float = 1.0) -> None:
        super().__init__(BandedRules(num_rounds=num_rounds, noise_multiplier=noise_multiplier))

    @property
    def drawn(self) -> Sequence[Drawn]:
        """The noise that this object and its copies have drawn."""
        return self.rules.training.noise.witness
