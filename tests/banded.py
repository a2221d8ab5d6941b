"""Noise that is correlated over rounds, as a part of a noised sum, and a small method with it: what no method has yet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, NoOpDpEvent

from flower_dp.core import noise
from flower_dp.core.noise import Generator
from flower_dp.core.sampling import RoundRobinSampling, Sampler
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.releases.release import Round
from flower_dp.strategies.releases.replies import Collected
from flower_dp.strategies.rules import About, Learnt, Options
from flower_dp.strategies.run_state import RunFacts, RunState
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
    lossy_messages: ClassVar[bool] = False
    secret_cohort: ClassVar[bool] = False

    def at(self, clip_norm: float) -> Self:
        return self

    def share(self, cohort_size: int) -> float:
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
        total += noise.nearest(begun, step)


class BandedRules:
    """The model moves by the noised mean of the clients whose turn it is."""

    def __init__(self, *, num_clients: int, cohort_size: int, num_rounds: int, noise_multiplier: float) -> None:
        sampling: Sampler = RoundRobinSampling(cohort_size=cohort_size)
        release = Release(
            what="the noised sum of clipped updates",
            seen_by="everyone who sees global models",
            unit="client",
            relation="add-or-remove-one",
            clip_norm=1.0,
            mechanism=Gaussian(noise_multiplier=noise_multiplier),
            sampler=sampling,
            num_clients=num_clients,
        )
        turns = math.ceil(num_rounds * cohort_size / num_clients)
        self.num_rounds, band = num_rounds, (0.5,) * (num_clients // cohort_size - 1)
        self.training = NoisedSum(name=BANDED, noise=Banded(release=release, band=band, num_turns=turns))
        self.about = About(title="Banded", num_clients=num_clients, delta=1e-3, stock_refusal=None)
        self.releases = (self.training,)

    def opened(self, names: tuple[str, ...], num_rounds: int | None) -> Self:
        return self

    def why_stop(self, state: RunState, server_round: int, cohort_size: int | None) -> str | None:
        return "its noise is for fewer rounds" if state.charges.number(BANDED) >= self.num_rounds else None

    def learn(self, state: RunState, now: Round, collected: Collected, rng: Generator) -> Learnt:
        mean, after = self.training.noised(state, now, collected, rng)
        return Learnt(vector=now.vector + mean, releases={BANDED: after})

    def numbers(self, state: RunState, now: Round | None) -> Mapping[str, float]:
        return {"epsilon": self._cost(state).epsilon}

    def noise_and_signal(self, dimension: int) -> tuple[float, float]:
        return 1.0, 1.0

    def statement(self, state: RunState, facts: RunFacts) -> PrivacyStatement:
        release, cost = self.training.release, self._cost(state)
        return PrivacyStatement(
            method=self.about.title,
            unit=release.unit,
            relation=release.relation,
            adversary=release.seen_by,
            delta=self.about.delta,
            epsilon=cost.epsilon,
            accountant=cost.accountant,
            paper=None,
            num_rounds=state.charges.number(BANDED),
            noise={},
            sampling=str(release.sampler),
            events=(),
            assumptions=(),
            not_covered=(),
            incidents=facts.incidents,
        )

    def _cost(self, state: RunState) -> Any:
        return self.training.history(state.charges).cost(self.about.delta)


class BandedStrategy(DPStrategy):
    """A run of those rules, for eight rounds of two of four clients unless told otherwise."""

    def __init__(
        self,
        *,
        num_clients: int = 4,
        cohort_size: int = 2,
        num_rounds: int = 8,
        noise_multiplier: float = 1.0,
        **options: Options,
    ) -> None:
        super().__init__(
            BandedRules(
                num_clients=num_clients, cohort_size=cohort_size, num_rounds=num_rounds, noise_multiplier=noise_multiplier
            ),
            **options,
        )

    @property
    def drawn(self) -> Sequence[Drawn]:
        """The noise that this object and its copies have drawn."""
        found: Witness = self.rules.training.noise.witness
        return found
