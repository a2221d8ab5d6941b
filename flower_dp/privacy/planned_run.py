"""The cost of a planned run: checked options, the event of the whole run, its epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flower_dp.core import checks, dp_events, sampling
from flower_dp.core.formatting import finite_or_none, format_rounded_up
from flower_dp.privacy import accounting, mechanisms, selection
from flower_dp.privacy.events import Relation

MOST_ROUNDS = 10**6
_MECHANISMS: Mapping[str, Any] = {"gaussian": mechanisms.Gaussian, "laplace": mechanisms.Laplace}
_SAMPLERS: Mapping[str, Any] = {
    "full": sampling.FullSampling,
    "poisson": sampling.PoissonSampling,
    "fixed-size": sampling.FixedSizeSampling,
    "round-robin": sampling.RoundRobinSampling,
}
# Samplings that read an option.
_OWNERS = {
    "sampling_rate": ("poisson",),
    "cohort_size": ("fixed-size", "round-robin"),
    "num_clients": ("fixed-size", "round-robin"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSchedule:
    """A run of equal releases whose noise is not chosen yet, as `from_options` returns it.

    `sizes` has the rate of Poisson sampling, cohort size and number of clients of fixed-size and round-robin sampling.

    Example:
        >>> from flower_dp.privacy import planned_run
        >>> sampled = {"sampling": "poisson", "sampling_rate": 0.1, "cohort_size": None, "num_clients": None}
        >>> run = planned_run.from_options(mechanism="gaussian", **sampled, num_rounds=100, delta=1e-5, relation=None)
        >>> noise_multiplier = run.calibrate(4.0)
        >>> run.cost(noise_multiplier)["epsilon"] <= 4.0
        True
    """

    mechanism: str
    sampling: str
    sizes: Mapping[str, Any]
    num_rounds: int
    delta: float
    relation: Relation

    def event(self, noise_multiplier: float) -> dp_events.DpEvent:
        """Return the event of the whole run; without noise it is not private."""
        release, rounds = _MECHANISMS[self.mechanism](noise_multiplier=noise_multiplier).event(), self.num_rounds
        sizes = dict(self.sizes)
        num_clients = sizes.pop("num_clients", 1)
        sampler = _SAMPLERS[self.sampling](**sizes)
        if self.sampling == "round-robin":
            rounds = sampler.participations(rounds, num_clients)
        else:
            release = sampler.event(release, 1, num_clients)
        return dp_events.SelfComposedDpEvent(release, rounds)

    def calibrate(self, epsilon: float) -> float:
        """Return the noise multiplier that keeps the run within `epsilon`, never too little."""
        return accounting.calibrate(self.event, epsilon=epsilon, delta=self.delta, relation=self.relation)

    def longest(self, epsilon: float, noise_multiplier: float) -> ReleaseSchedule:
        """Return this run with the largest number of rounds that costs at most `epsilon` with this noise.

        Raises:
            ValueError: if `epsilon` is too small for one round, or large enough for more than `MOST_ROUNDS`.
        """

        def event(num_rounds: int) -> dp_events.DpEvent:
            return replace(self, num_rounds=num_rounds).event(noise_multiplier)

        limit, rounds = 1, 1
        while rounds == limit <= MOST_ROUNDS:
            limit *= 8
            rounds = accounting.max_repetitions(event, epsilon=epsilon, delta=self.delta, relation=self.relation, limit=limit)
        if rounds > MOST_ROUNDS:
            allowed = f"epsilon={epsilon:g} allows more than {MOST_ROUNDS:,} rounds; choose less noise"
            raise ValueError(f"--noise-multiplier={noise_multiplier:g}: {allowed}")
        if rounds == 0:
            epsilon_of_one = finite_or_none(accounting.epsilon(event(1), delta=self.delta, relation=self.relation).epsilon)
            costs = "has no finite epsilon" if epsilon_of_one is None else f"costs epsilon={format_rounded_up(epsilon_of_one, 6)}"
            raise ValueError(f"--epsilon={epsilon:g}: one round with --noise-multiplier={noise_multiplier:g} {costs}")
        return replace(self, num_rounds=rounds)

    def cost(self, noise_multiplier: float) -> dict[str, Any]:
        """Return the cost of the run as JSON values: an infinite epsilon is None, and `private` is false.

        `epsilon_rdp` is there only if the Renyi accountant has a bound.
        """
        event = self.event(noise_multiplier)
        cost = accounting.epsilon(event, delta=self.delta, relation=self.relation)
        renyi = accounting.rdp_epsilon(event, delta=self.delta, relation=self.relation)
        return {
            "epsilon": finite_or_none(cost.epsilon),
            "private": math.isfinite(cost.epsilon),
            **({} if renyi is None else {"epsilon_rdp": finite_or_none(renyi)}),
            "noise_multiplier": noise_multiplier,
            "delta": cost.delta,
            "relation": cost.relation,
            "accountant": cost.accountant,
            "mechanism": self.mechanism,
            "sampling": self.sampling,
            **self.sizes,
            "num_rounds": self.num_rounds,
        }


def best_of(noise_multiplier: float, number: selection.RunCountLaw, **options: Any) -> dict[str, Any]:
    """Return the cost of a run, and that of the best of K such runs; options are those of `from_options`.

    Raises:
        ValueError: naming the option that is missing, out of range or out of place.
    """
    run = from_options(**options)
    return run.cost(noise_multiplier) | choice([run.event(noise_multiplier)], number, delta=run.delta, relation=run.relation)


def choice(
    runs: Sequence[dp_events.DpEvent], number: selection.RunCountLaw, *, delta: float, relation: Relation
) -> dict[str, Any]:
    """Return the cost of choosing among runs with these events, as JSON values."""
    cost = selection.epsilon(runs, number, delta=delta, relation=relation)
    return {
        "best_of_mean": number.mean,
        "best_of_shape": number.shape if math.isfinite(number.shape) else "poisson",
        "best_of_epsilon": finite_or_none(cost.epsilon),
        "best_of_accountant": cost.accountant,
    }


def solve(
    *, epsilon: float | None = None, noise_multiplier: float | None = None, num_rounds: int | None = None, **options: Any
) -> dict[str, Any]:
    """Return the cost of a run; compute the one of epsilon, noise multiplier and number of rounds that is left out.

    Args:
        epsilon: largest epsilon allowed.
        noise_multiplier: noise std / clip norm; for Laplace noise scale / L1 clip norm.
        num_rounds: number of releases.
        options: other options of `from_options`.

    Raises:
        ValueError: naming the option that is missing, out of range or out of place, or the target that can't be met.
    """
    target = None if epsilon is None else checks.number("--epsilon", epsilon, above=0)
    multiplier = None if noise_multiplier is None else checks.number("--noise-multiplier", noise_multiplier, at_least=0)
    run = from_options(num_rounds=1 if num_rounds is None else num_rounds, **options)
    match (target, multiplier, num_rounds):
        case (None, float(noise), int()):
            return run.cost(noise)
        case (float(most), None, int()):
            noise = run.calibrate(most)
        case (float(most), float(noise), None):
            run = run.longest(most, noise)
        case _:
            raise ValueError("exactly two of --epsilon, --noise-multiplier and --num-rounds must be given; the third is computed")
    return run.cost(noise) | {"target_epsilon": target}


def from_options(
    *,
    mechanism: str,
    sampling: str,
    sampling_rate: float | None,
    cohort_size: int | None,
    num_clients: int | None,
    num_rounds: int,
    delta: float | None,
    relation: str | None,
) -> ReleaseSchedule:
    """Return the planned run of command-line options; None stands for an option that was not given.

    Raises:
        ValueError: naming the option that is missing, out of range or out of place.
    """
    checks.one_of("--mechanism", mechanism, tuple(_MECHANISMS))
    checks.one_of("--sampling", sampling, tuple(_SAMPLERS))
    given = {"sampling_rate": sampling_rate, "cohort_size": cohort_size, "num_clients": num_clients}
    sizes = {name: value for name, value in given.items() if value is not None}
    for name, owners in _OWNERS.items():
        option = f"--{name.replace('_', '-')}"
        if name in sizes and sampling not in owners:
            kinds = " or ".join(f"--sampling {owner}" for owner in owners)
            raise ValueError(f"{option}={sizes[name]}: belongs to {kinds}, not to --sampling {sampling}")
        if name not in sizes and sampling in owners:
            raise ValueError(f"{option} is missing; --sampling {sampling} needs it")
    if "sampling_rate" in sizes:
        checks.number("--sampling-rate", sampling_rate, above=0, at_most=1)
    if "num_clients" in sizes:
        size = checks.integer("--num-clients", num_clients, at_least=1)
        checks.integer("--cohort-size", cohort_size, at_least=1, at_most=size)
    if sampling == "fixed-size" and relation == "add-or-remove-one":
        raise ValueError("--relation=add-or-remove-one: with --sampling fixed-size it must be replace-one")
    if delta is None:
        raise ValueError("--delta is missing")
    if not checks.number("--delta", delta, at_least=0, below=1) and mechanism != "laplace":
        raise checks.bad("--delta", delta, "a finite number > 0 and < 1")
    return ReleaseSchedule(
        mechanism=mechanism,
        sampling=sampling,
        sizes=sizes,
        num_rounds=checks.integer("--num-rounds", num_rounds, at_least=1),
        delta=delta,
        relation="replace-one" if relation == "replace-one" or sampling == "fixed-size" else "add-or-remove-one",
    )
