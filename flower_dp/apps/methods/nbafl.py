"""NbAFL, all clients or K of N: arguments from the settings, and the planning problem."""

import math
from collections.abc import Mapping
from typing import Any

from flower_dp.apps.settings import Settings, default_of
from flower_dp.apps.strategy_arguments import Sizes, cohort_size_of, local_arguments
from flower_dp.core import checks
from flower_dp.planning.nbafl import best_proximal
from flower_dp.planning.planner import Data, Inputs


def arguments(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of strategy and recipe that several settings decide together."""
    return {
        **local_arguments(settings, sizes),
        "cohort_size": None if settings.sampling == "full" else cohort_size_of(settings),
        **_budget(settings, own),
    }


def planning(settings: Settings, own: Any, data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys of the planning problem that a preset gives."""
    values: dict[str, object] = {
        "num_rounds": settings.num_rounds,
        "cohort_size": settings.cohort_size if settings.sampling == "fixed-size" else len(data.num_records),
        "clip_norm": own.clip_norm,
        "delta": own.delta,
    }
    if not own.epsilon:  # the bound uses the paper's epsilon, not the proved one
        values["epsilon"] = own.paper_epsilon
    rounds = given.get("num_rounds", settings.num_rounds)
    if isinstance(rounds, int):
        values["uplink_exposures"] = min(own.uplink_exposures or own.num_replies or rounds, rounds)
    if "proximal" in given:
        return Inputs(values=values)
    known: dict[str, Any] = {**data.constants.nbafl(), **given}
    least = best_proximal(smoothness=known["smoothness"], dissimilarity=known["dissimilarity"]) / 2
    if settings.proximal_mu > least:
        return Inputs(
            values=values | {"proximal": settings.proximal_mu}, notes=(f"proximal={settings.proximal_mu:g} is the preset's",)
        )
    return Inputs(values=values, notes=(f"at the preset's proximal={settings.proximal_mu:g} the bound is vacuous",))


def _budget(settings: Settings, own: Any) -> dict[str, Any]:
    """Return each client's budget: the proved epsilon, or the paper's."""
    checks.integer("num-replies", own.num_replies, at_least=0)
    checks.integer("uplink-exposures", own.uplink_exposures, at_least=0)
    rounds = max(1, settings.num_rounds)
    if own.epsilon != math.inf and not checks.number("epsilon", own.epsilon, at_least=0):
        # A device's own num-replies limits its replies. The number of rounds comes from the server, so it is used last.
        exposures = own.uplink_exposures or own.num_replies or rounds
        return {"epsilon": None, "uplink_exposures": exposures, "num_replies": own.num_replies or exposures}
    if own.paper_epsilon != default_of(own, "paper_epsilon"):
        raise checks.refusal("paper-epsilon", own.paper_epsilon, f"epsilon={own.epsilon:g} is set too; remove one of them")
    return {"paper_epsilon": None, "uplink_exposures": None, "num_replies": own.num_replies or rounds}
