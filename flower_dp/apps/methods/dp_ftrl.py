"""DP-FTRL: arguments from the settings."""

from typing import Any

from flower_dp.apps.methods import client_level
from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes
from flower_dp.planning.correlated_noise import noise_named


def arguments(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of the strategy that several settings decide together."""
    made = client_level.arguments(settings, own, sizes)
    made.pop("target_epsilon", None)  # the whole run is charged at its start
    noise = noise_named(own.noise, num_buffers=own.num_buffers, bands=own.bands)
    return made | {"num_rounds": settings.num_rounds, "noise": noise}
