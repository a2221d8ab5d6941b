"""The forecast of a run's statement before its first round: releases are charged, and nothing is released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flower_dp.core import checks, dp_events
from flower_dp.core.sampling import RoundRobinSampling
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.calibration import smallest_cohort
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases.local_releases import LocalReleases
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.releases.release import Release
from flower_dp.strategies.releases.shared_noise import NoiseSharing
from flower_dp.strategies.rules import MethodRules, evaluation_of
from flower_dp.strategies.run_state import RunState
from flower_dp.strategies.strategy import DPStrategy


def forecast(strategy: DPStrategy, *, num_rounds: int, names: Sequence[str]) -> PrivacyStatement:
    """Return the statement that this strategy's run will have. Uses the strategy up: don't start it afterwards.

    If the cost depends on random cohorts, the forecast assumes cohorts that cost as much as any likely ones. Some clients with
    their own budgets are selected in every round until the budget is spent. A cohort whose size affects the cost is as small as
    any is likely to be.

    Args:
        strategy: the strategy, constructed as for the run.
        num_rounds: number of rounds that `start` will get; the run may end before, by its target or its budgets.
        names: names of all clients.

    Raises:
        ValueError: if the strategy can't run so many rounds.

    Example:
        >>> from flower_dp.core.sampling import FullSampling
        >>> from flower_dp.strategies import DPFedAvg
        >>> from flower_dp.strategies.forecast import forecast
        >>> strategy = DPFedAvg(clip_norm=0.5, epsilon=2.0, num_rounds=5, sampling=FullSampling(), num_clients=9, delta=1e-3)
        >>> round(forecast(strategy, num_rounds=5, names=[f"hospital-{number}" for number in range(9)]).epsilon, 3)
        2.0
    """
    rules, state = _forecast(strategy, num_rounds, names)
    return rules.statement(state, strategy.facts)


def _forecast(strategy: DPStrategy, num_rounds: int, names: Sequence[str]) -> tuple[MethodRules, RunState]:
    """Return the rules of a run, and its state with all charges."""
    rules = strategy.rules.with_clients(tuple(names), checks.integer("num_rounds", num_rounds, at_least=0))
    training, evaluation, planned = rules.releases[0], evaluation_of(rules), getattr(rules, "planned", None)
    state = replace(strategy.state, planned_rounds=num_rounds)
    for server_round in range(1, num_rounds + 1):
        if rules.stop_reason(state, server_round, None):
            break
        cohort = _likely_cohort(training, state.charges, names, num_rounds)
        if rules.stop_reason(state, server_round, len(cohort)):
            break
        charges = state.charges.after(training.charge(state.charges, server_round, cohort))
        if planned is not None:
            charges = charges.after(planned(charges, server_round, cohort))
        if evaluation is not None and evaluation.due(charges, server_round):
            asked = _likely_cohort(evaluation, charges, names, num_rounds)
            charges = charges.after(evaluation.charge(charges, server_round, asked))
        state = replace(state, charges=charges)
    return rules, state


def outside_event(strategy: DPStrategy, *, num_rounds: int, names: Sequence[str]) -> tuple[dp_events.DpEvent, PrivacyStatement]:
    """Return the event of a run against outsiders, and its statement; arguments as of `forecast`.

    Raises:
        ValueError: if every device has its own ledger; or as `forecast`.
    """
    rules, state = _forecast(strategy, num_rounds, names)
    statement = rules.statement(state, strategy.facts)
    if not isinstance(rules, ClientLevelRules):
        raise ValueError(
            f"{statement.method}: devices are protected from the server, which sees every run; choosing among runs costs each "
            "device the joint cost of all of them"
        )
    return rules.outside_ledger(state.charges).event, statement


def _likely_cohort(release: Release, charges: Charges, names: Sequence[str], num_rounds: int) -> list[str]:
    """Return a cohort that costs as much as any likely one."""
    if isinstance(release, NoisedSum) and isinstance(release.noise, NoiseSharing):
        return list(names[: smallest_cohort(release.noise, num_rounds)])
    if not isinstance(release, LocalReleases):
        raise TypeError(f"release {release.name}: is a {type(release).__name__}")
    if isinstance(release.sampling, RoundRobinSampling):
        order = release.sampling.sample(charges.number(release.name) + 1, len(names), np.random.default_rng())
        names = [names[index] for index in order]
    paying = [name for name, pays in zip(names, release.paying(charges, names), strict=True) if pays]
    return paying[: release.sampling.max_cohort_size(len(names))]
