"""FedSGD-DPC, Laplace and Gaussian: arguments from the settings, and the planning problem."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes, cohort_size_of, local_arguments, per_client
from flower_dp.core import checks
from flower_dp.planning.planner import Data, Inputs
from flower_dp.privacy.accounting import parse_relation


def arguments(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of strategy and recipe that several settings decide together."""
    checks.integer("num-replies", own.num_replies, at_least=0)
    size = cohort_size_of(settings)
    theory = bool(own.strong_convexity or own.smoothness)
    return {
        **local_arguments(settings, sizes),
        "cohort_size": size,
        "relation": parse_relation(own.relation),
        "num_replies": own.num_replies or max(1, -(-settings.num_rounds * size // settings.num_clients)),
        "epsilon": per_client(settings, "client-epsilons", own.client_epsilons, own.epsilon),
        "learning_rate": None if theory else settings.learning_rate,
        "learning_rate_decay": settings.learning_rate_decay,
        "strong_convexity": own.strong_convexity if theory else None,
        "smoothness": own.smoothness if theory else None,
    }


def planning(settings: Settings, own: Any, data: Data, given: Mapping[str, object]) -> Inputs:
    """Return the keys of the planning problem that a preset gives."""
    epsilons = per_client(settings, "client-epsilons", own.client_epsilons, own.epsilon)
    values: dict[str, object] = {
        "mechanism": own.mechanism,
        "clip_norm": own.clip_norm,
        "epsilon": list(epsilons.values()) if own.client_epsilons else own.epsilon,
    }
    notes = []
    if given.get("mechanism", own.mechanism) == "gaussian":
        values["sampling_rate"] = own.record_sampling_rate
        if own.delta:
            values["delta"] = own.delta
        if own.noise_constant:
            values["noise_constant"] = own.noise_constant
        if not {"num_rounds", "max_rounds"} & given.keys():
            values["max_rounds"] = settings.num_rounds
            notes.append(f"max_rounds={settings.num_rounds} is the preset's num-rounds")
    return Inputs(values=values, notes=tuple(notes))
