"""DP-FedAvg, DP-FedSAM and Fed-SMP: methods with one noised sum."""

from typing import Any

from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes, client_level_delta, clip_norm_of, evaluation_of, noise_of, sampler_of


def arguments(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of the strategy that several settings decide together."""
    private = bool(own.noise_multiplier or own.epsilon)
    return {
        "clip_norm": clip_norm_of(own),
        **noise_of(settings, own),
        "sampling": sampler_of(settings),
        "num_clients": settings.num_clients,
        "delta": client_level_delta(own.delta, settings, private=private),
        "evaluation": evaluation_of(settings),
    }
