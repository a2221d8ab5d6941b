"""DP-PASGD; DP-SGD with one local step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_dp.apps.parts import Sizes, local_words, per_client
from flower_dp.apps.settings import Settings
from flower_dp.core import checks
from flower_dp.planning.planner import Data, Inputs
from flower_dp.strategies import DPPASGD

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.clients import LocalDPClient, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `dp-pasgd`."""

    clip_norm: float = 1.0
    epsilon: float = 4.0
    client_epsilons: str = ""
    delta: float = 1e-4
    num_local_steps: int = 10
    num_steps: int = 0
    client_batch_sizes: str = ""
    batch_sampling: str = "fixed-size"
    calibration: str = "exact"
    cost_per_aggregation: float = 0.0
    cost_per_step: float = 0.0
    max_cost: float = 0.0
    best_by: str = ""


def strategy(settings: Settings, own: Own, sizes: Sizes) -> DPPASGD:
    """Return the server's side."""
    checks.number("max-cost", own.max_cost, at_least=0)
    return DPPASGD(
        **_shared(settings, own),
        **local_words(settings, sizes),
        cost_per_aggregation=own.cost_per_aggregation,
        cost_per_step=own.cost_per_step,
        max_cost=own.max_cost or None,
        best_by=own.best_by or ("validation-loss" if settings.validation_ratio else "loss"),
    )


def client(settings: Settings, own: Own, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "LocalDPClient":
    """Return a node's client."""
    from flower_dp.apps.client_parts import local_client  # noqa: PLC0415 - torch takes a second
    from flower_dp.apps.tasks.models import loss_of  # noqa: PLC0415
    from flower_dp.clients import DPPASGDRecipe  # noqa: PLC0415

    recipe = DPPASGDRecipe(**_shared(settings, own), loss=loss_of(settings.model))
    return local_client(settings, recipe, model, clients, max_clip_norm=own.clip_norm)


def planning(settings: Settings, own: Own, data: Data, given: Mapping[str, object]) -> Inputs:
    """Return what a preset says of its planning problem."""
    shared = _shared(settings, own)
    values: dict[str, object] = {
        "epsilon": min(shared["epsilon"].values()),
        "delta": own.delta,
        "learning_rate": settings.learning_rate,
        "clip_norm": own.clip_norm,
        "batch_size": list(shared["batch_size"].values()) if own.client_batch_sizes else settings.batch_size,
    }
    if own.cost_per_aggregation or own.cost_per_step:
        values |= {"cost_per_aggregation": own.cost_per_aggregation, "cost_per_step": own.cost_per_step}
    if own.max_cost:
        values["max_cost"] = own.max_cost
    notes = ("epsilon is that of the client with the smallest",) if own.client_epsilons else ()
    return Inputs(values=values, notes=notes)


def _shared(settings: Settings, own: Own) -> dict[str, Any]:
    """Return what both sides must agree on."""
    checks.integer("num-steps", own.num_steps, at_least=0)
    return {
        "clip_norm": own.clip_norm,
        "epsilon": per_client(settings, "client-epsilons", own.client_epsilons, own.epsilon),
        "delta": own.delta,
        "num_steps": own.num_steps or max(1, settings.num_rounds) * own.num_local_steps,
        "num_local_steps": own.num_local_steps,
        "batch_size": per_client(settings, "client-batch-sizes", own.client_batch_sizes, settings.batch_size),
        "batch_sampling": own.batch_sampling,
        "calibration": own.calibration,
        "learning_rate": settings.learning_rate,
        "learning_rate_decay": settings.learning_rate_decay,
        "weight_decay": settings.weight_decay,
    }
