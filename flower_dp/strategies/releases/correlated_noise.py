"""Noise that is correlated over rounds (DP-FTRL), and noised sums whose clients keep a minimum separation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec
import numpy as np

from flower_dp.core import checks, dp_events, noise
from flower_dp.core.noise import Generator
from flower_dp.core.participation import MinimumSeparationSampling, Participation
from flower_dp.core.sampling import Sampler
from flower_dp.core.strategy_matrix import ParticipationSchema, StrategyMatrix
from flower_dp.planning.correlated_noise import CorrelatedNoise
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.noised_sum import NoisedSum, SumState
from flower_dp.strategies.releases.participation_state import ParticipationState
from flower_dp.strategies.releases.shared_noise import NoiseSharing, converted
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import ReleaseRequest, Separation

log = logging.getLogger("flwr")


def schema_of(sampling: Sampler, num_rounds: int | None) -> ParticipationSchema:
    """Return the participations that correlated noise is made for.

    Raises:
        ValueError: without a number of rounds, or for a sampler that keeps no minimum separation.
    """
    if not isinstance(sampling, MinimumSeparationSampling):
        why = "correlated noise needs a MinimumSeparationSampling, which bounds how often and how soon a client takes part"
        raise checks.refusal("sampling", sampling, why)
    if num_rounds is None:
        raise checks.BadValue("num_rounds", "num_rounds: is missing; correlated noise is made for the whole run")
    rounds = checks.integer("num_rounds", num_rounds, at_least=1)
    separation, most = min(sampling.min_separation, rounds), sampling.participations(rounds)
    return ParticipationSchema(num_rounds=rounds, min_separation=separation, max_participations=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRelease(Release):
    """The noised sums of all rounds together, as one Gaussian release.

    Attributes:
        sensitivity_of_run: L2 norm of C x for one client, over the clip norm.
    """

    sensitivity_of_run: float

    def event(self, server_round: int) -> dp_events.DpEvent:
        """Return the event of the whole run in round 1, and one without cost later."""
        if not (multiplier := self.mechanism.noise_multiplier):
            return dp_events.NonPrivateDpEvent()
        return dp_events.NoOpDpEvent() if server_round > 1 else dp_events.GaussianDpEvent(multiplier / self.sensitivity_of_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelatedSharing(NoiseSharing):
    """Noise of the server: row t of C^-1 Z in round t, where each row of Z has std noise_multiplier x clip_norm.

    Attributes:
        kind: kind of the noise.
        schema: participations that it is made for.
        digest: hash of C: a run that resumes must have the same.
        matrix: strategy matrix C.
    """

    kind: CorrelatedNoise
    schema: ParticipationSchema
    digest: str
    matrix: StrategyMatrix = field(repr=False, compare=False)

    @classmethod
    def of(cls, shared: NoiseSharing, kind: CorrelatedNoise, num_rounds: int | None) -> Self:
        """Return this noise in place of independent noise.

        Raises:
            ValueError: naming the argument that does not go with it.
        """
        schema = schema_of(shared.release.sampler, num_rounds)
        matrix = kind.matrix(schema)
        release = converted(shared.release, RunRelease, sensitivity_of_run=matrix.sensitivity(schema))
        return converted(shared, cls, release=release, kind=kind, schema=schema, digest=matrix.digest, matrix=matrix)

    @property
    def run_sensitivity(self) -> float:
        """The L2 norm of C x for one client, over the clip norm."""
        release = self.release
        assert isinstance(release, RunRelease)  # noqa: S101
        return release.sensitivity_of_run

    @property
    def promised_multiplier(self) -> float:
        """The noise multiplier of the whole run, which clients are promised: that of each row of Z over the sensitivity."""
        return self.release.mechanism.noise_multiplier / self.run_sensitivity

    def stop_reason(self, number: int) -> str | None:
        """Return why the noise does not cover round `number`: it is made for fewer rounds."""
        most = self.schema.num_rounds
        return None if number <= most else f"its noise was made for num_rounds={most}"

    def check_rounds(self, num_rounds: int) -> None:
        """Refuse any other number of rounds: more are not covered, fewer would cost as much.

        Raises:
            ValueError: naming both numbers.
        """
        if num_rounds != self.schema.num_rounds:
            raise checks.refusal(
                "num_rounds",
                num_rounds,
                f"the strategy was constructed with num_rounds={self.schema.num_rounds}, for which its noise was made; pass the "
                "same number to both",
            )

    @property
    def numbers(self) -> dict[str, float]:
        """The sensitivity of the run, and the std of the noise in a sum of all rounds so far, as root mean square over rounds."""
        error = self.matrix.prefix_error(self.schema.num_rounds) * self.release.noise_scale
        return {
            "sensitivity_of_the_run_in_clip_norms": self.run_sensitivity,
            "noise_multiplier_of_the_run": self.promised_multiplier,
            "noise_std_of_prefix_sums": error,
        }

    @property
    def num_rounds_of_event(self) -> int:
        """The number of rounds that one event covers: all of them."""
        return self.schema.num_rounds

    @property
    def max_participations(self) -> int:
        """The largest number of participations that the noise is made for."""
        return self.schema.max_participations

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the noise of the whole run."""
        return (
            f"The noise of the rounds is correlated: {self.kind}. One release covers all {self.schema.num_rounds} rounds. It was "
            "charged before the first one, and a run that ends early costs as much.",
            "Whoever knows the secret state of the noise can remove it from every model. It is on the server alone: in memory "
            "and in the run's checkpoint folder.",
        )

    def begin(self, state: Any, number: int, length: int, rng: Generator) -> tuple[np.ndarray, ParticipationState]:
        """Return the noise of this round, before any message leaves, and the next secret state."""
        if (reason := self.stop_reason(number)) is not None:
            raise ValueError(f"round {number}: can't be run: {reason}")
        row, after = (state or ParticipationState()).row(self.matrix, number, length, rng)
        return row * self.release.noise_scale, after

    def add(self, total: np.ndarray, begun: Any, *, step: float, num_replies: int, cohort_size: int, rng: Generator) -> None:
        """Add the round's noise to the sum of the replies, in place: x + round(n) = round(x + n) for x on the lattice."""
        total += noise.round_to_nearest(begun, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparatedSum(NoisedSum):
    """A noised sum whose clients keep a minimum separation; the server keeps, by name, when each took part."""

    @property
    def separation(self) -> MinimumSeparationSampling:
        """The sampler of its cohorts."""
        sampling = self.release.sampler
        assert isinstance(sampling, MinimumSeparationSampling)  # noqa: S101
        return sampling

    @property
    def max_participations(self) -> int | None:
        """The largest number of participations of a client; None for as many as the separation allows."""
        made_for = self.noise.max_participations if isinstance(self.noise, CorrelatedSharing) else None
        return made_for or self.separation.max_participations

    @property
    def noise_cancels(self) -> bool:
        """Whether later rounds cancel noise of a round, so that the noise of one round alone says little."""
        return isinstance(self.noise, CorrelatedSharing)

    @property
    def accepts_new_clients(self) -> bool:
        """Whether more clients than `release.num_units` may take part: here they may, as each is charged for the whole run."""
        return self.noise.placement == "central"

    def past(self, state: RunState) -> Mapping[str, Participation]:
        """Return the participations so far by client name."""
        noise = self.state_in(state).noise
        return {} if noise is None else noise.past

    def cohort(self, state: RunState, names: tuple[str, ...], rng: Generator) -> tuple[np.ndarray, SumState]:
        """Return the indices of the next round's clients, among those that may take part again."""
        sum_state, number = self.state_in(state), state.charges.number(self.name) + 1
        chosen, wanted = self.separation.choose(names, self.past(state), number, rng), self.separation.cohort_size
        if len(chosen) < wanted:
            text = "Only %s of cohort_size=%s clients are connected and may take part again in round %s"
            log.warning(text, len(chosen), wanted, number)
        return chosen, sum_state

    def ask(self, state: RunState, size: int, names: Sequence[str], rng: Generator) -> tuple[ReleaseRequest, Any, SumState]:
        """Return as `NoisedSum.ask`; the request tells clients the separation, and their participation counts from now on."""
        number, before = state.charges.number(self.name) + 1, self.state_in(state).noise or ParticipationState()
        asked, begun, after = NoisedSum.ask(self, state, size, names, rng)
        past, sampling = before.asked(tuple(names), number), self.separation
        told = Separation(
            number=number,
            min_separation=sampling.min_separation,
            max_participations=self.max_participations,
            whole_run=self.noise_cancels,
        )
        kept = replace(after.noise or before, past=past)
        return msgspec.structs.replace(asked, separation=told), begun, replace(after, noise=kept)
