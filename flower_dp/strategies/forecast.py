"""The statement that a run will end with, before its first round: releases are charged, and nothing is released."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flower_dp.core import dp
from flower_dp.core.sampling import RoundRobinSampling
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.strategies.calibration import smallest_cohort
from flower_dp.strategies.client_level import ClientLevelRules
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.strategies.releases.own_replies import OwnReplies
from flower_dp.strategies.releases.round import RoundRelease
from flower_dp.strategies.strategy import DPStrategy


def forecast(strategy: DPStrategy, *, num_rounds: int, names: Sequence[str]) -> PrivacyStatement:
    """Return what the statement of a new strategy's run will be; the strategy itself is used up.

    Where cohorts are drawn and cost depends on them, it is the most that a run costs: of clients with budgets of their own, some
    are asked in every round, as far as their budgets go, and a cohort whose size enters the cost is as small as any is likely to
    be.

    Args:
        strategy: as for the run.
        num_rounds: as `start` will be told; the run may end before, as its target or its budgets say.
        names: of all clients.

    Raises:
        ValueError: if the strategy can't be run for so many rounds.

    Example:
        >>> from flower_dp.core.sampling import FullSampling
        >>> from flower_dp.strategies import DPFedAvg
        >>> from flower_dp.strategies.forecast import forecast
        >>> strategy = DPFedAvg(clip_norm=0.5, epsilon=2.0, num_rounds=5, sampling=FullSampling(), num_clients=9, delta=1e-3)
        >>> round(forecast(strategy, num_rounds=5, names=[f"hospital-{number}" for number in range(9)]).epsilon, 3)
        2.0
    """
    strategy.plan(num_rounds)
    rules = strategy.rules
    rules.open(tuple(names))
    for server_round in range(1, num_rounds + 1):
        if rules.why_stop(server_round, None):
            break
        cohort = _asked(rules.training, names, num_rounds)
        if rules.why_stop(server_round, len(cohort)):
            break
        charge = rules.training.next_charge(cohort)
        rules.training.take(charge)
        rules.unfinished(charge)  # what else the round will release, where its charge does not have all of it
        if rules.evaluation is not None and rules.evaluation.due(server_round):
            evaluation = rules.evaluation.release
            evaluation.take(evaluation.next_charge(_asked(evaluation, names, num_rounds)))
    return strategy.statement


def outside_event(strategy: DPStrategy, *, num_rounds: int, names: Sequence[str]) -> tuple[dp.DpEvent, PrivacyStatement]:
    """Return what a run is charged with against those who are no clients, and its statement; arguments are those of `forecast`.

    Raises:
        ValueError: if every device has a ledger of its own; or as `forecast`.
    """
    statement, rules = forecast(strategy, num_rounds=num_rounds, names=names), strategy.rules
    if not isinstance(rules, ClientLevelRules):
        raise ValueError(
            f"{statement.method}: devices are protected from the server, which sees every run; choosing among runs costs each "
            "device what all of them cost together"
        )
    return rules.outside_ledger.event, statement


def _asked(release: RoundRelease, names: Sequence[str], num_rounds: int) -> list[str]:
    """Return a cohort that costs as much as any that is likely."""
    if isinstance(release, NoisedSum):
        return list(names[: smallest_cohort(release.shared, num_rounds)])
    if not isinstance(release, OwnReplies):
        raise TypeError(f"release {release.name}: is a {type(release).__name__}")
    if isinstance(release.sampling, RoundRobinSampling):
        turn = release.sampling.choose(release.num_charged + 1, len(names), np.random.default_rng())
        return [names[place] for place in turn if release.can_pay(names[place])]
    return [name for name in names if release.can_pay(name)][: release.sampling.largest_cohort(len(names))]
