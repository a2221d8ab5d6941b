"""DP-PASGD, and DP-SGD as its case of one local step: arguments from the settings, and the planning problem."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes, local_arguments, per_client
from flower_dp.core import checks
from flower_dp.planning.planner import Data, Inputs


def arguments(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of strategy and recipe that several settings decide together."""
    checks.number("max-resource-cost", own.max_resource_cost, at_least=0)
    return {
        **local_arguments(settings, sizes),
        **_shared(settings, own),
        "learning_rate": settings.learning_rate,
        "learning_rate_decay": settings.learning_rate_decay,
        "weight_decay": settings.weight_decay,
        "best_model_metric": own.best_model_metric or ("validation-loss" if settings.validation_ratio else "loss"),
    }


def planning(settings: Settings, own: Any, data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys of the planning problem that a preset gives."""
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
    if own.max_resource_cost:
        values["max_resource_cost"] = own.max_resource_cost
    notes = ("epsilon is the smallest of the clients' budgets",) if own.client_epsilons else ()
    return Inputs(values=values, notes=notes)


def _shared(settings: Settings, own: Any) -> dict[str, Any]:
    checks.integer("num-steps", own.num_steps, at_least=0)
    return {
        "epsilon": per_client(settings, "client-epsilons", own.client_epsilons, own.epsilon),
        "num_steps": own.num_steps or max(1, settings.num_rounds) * own.num_local_steps,
        "batch_size": per_client(settings, "client-batch-sizes", own.client_batch_sizes, settings.batch_size),
    }
