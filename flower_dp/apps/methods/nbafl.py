"""NbAFL, all clients or K of N."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_dp.apps.parts import Sizes, cohort_size_of, local_words
from flower_dp.apps.settings import Settings
from flower_dp.core import checks
from flower_dp.planning.nbafl_bound import best_proximal
from flower_dp.planning.planner import Data, Inputs
from flower_dp.strategies import NbAFL

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.clients import LocalDPClient, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `nbafl`."""

    clip_norm: float = 20.0
    epsilon: float = 0.0
    paper_epsilon: float = 50.0
    delta: float = 0.01
    uplink_exposures: int = 0
    num_replies: int = 0
    aggregation: str = "data-size"


def strategy(settings: Settings, own: Own, sizes: Sizes) -> NbAFL:
    """Return the server's side."""
    return NbAFL(
        **_shared(settings, own),
        **local_words(settings, sizes),
        cohort_size=None if settings.sampling == "full" else cohort_size_of(settings),
        aggregation=own.aggregation,
    )


def client(settings: Settings, own: Own, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "LocalDPClient":
    """Return a node's client."""
    from flower_dp.apps.client_parts import local_client, training_of  # noqa: PLC0415 - torch takes a second
    from flower_dp.clients import NbAFLRecipe  # noqa: PLC0415

    recipe = NbAFLRecipe(**_shared(settings, own), training=training_of(settings), min_records=min(sizes().values()))
    return local_client(settings, recipe, model, clients, max_clip_norm=own.clip_norm)


def planning(settings: Settings, own: Own, data: Data, given: Mapping[str, object]) -> Inputs:
    """Return what a preset says of its planning problem."""
    values: dict[str, object] = {
        "num_rounds": settings.num_rounds,
        "cohort_size": settings.cohort_size if settings.sampling == "fixed-size" else len(data.num_records),
        "clip_norm": own.clip_norm,
        "delta": own.delta,
    }
    if not own.epsilon:  # the bound is in the paper's
        values["epsilon"] = own.paper_epsilon
    rounds = given.get("num_rounds", settings.num_rounds)
    if isinstance(rounds, int):
        values["uplink_exposures"] = min(own.uplink_exposures or own.num_replies or rounds, rounds)
    if "proximal" in given:
        return Inputs(values=values)
    known: dict[str, Any] = {**data.constants.nbafl(), **given}
    least = best_proximal(smoothness=known["smoothness"], dissimilarity=known["dissimilarity"]) / 2
    if settings.proximal > least:
        return Inputs(values=values | {"proximal": settings.proximal}, notes=(f"proximal={settings.proximal:g} is the preset's",))
    return Inputs(values=values, notes=(f"at the preset's proximal={settings.proximal:g} the bound says nothing",))


def _shared(settings: Settings, own: Own) -> dict[str, Any]:
    """Return what both sides must agree on."""
    checks.integer("num-replies", own.num_replies, at_least=0)
    checks.integer("uplink-exposures", own.uplink_exposures, at_least=0)
    rounds = max(1, settings.num_rounds)
    # A device sends as many replies as it says itself; the number of rounds is the server's word.
    exposures = own.uplink_exposures or own.num_replies or rounds
    shared = {"clip_norm": own.clip_norm, "delta": own.delta}
    if own.epsilon != math.inf and not checks.number("epsilon", own.epsilon, at_least=0):
        paper = {"paper_epsilon": own.paper_epsilon, "uplink_exposures": exposures}
        return {**shared, **paper, "num_replies": own.num_replies or exposures}
    if own.paper_epsilon != Own().paper_epsilon:
        raise ValueError(f"paper-epsilon={own.paper_epsilon:g}: epsilon={own.epsilon:g} is given too; leave out one of them")
    return {**shared, "epsilon": own.epsilon, "num_replies": own.num_replies or rounds}
