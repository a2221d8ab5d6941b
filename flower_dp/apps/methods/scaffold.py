"""SCAFFOLD, with and without privacy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flower_dp.apps.methods.dp_fedpaq import shared, strategy_words
from flower_dp.apps.parts import Sizes
from flower_dp.apps.settings import Settings
from flower_dp.strategies import Scaffold

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.clients import LocalDPClient, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `scaffold`."""

    epsilon: float = 4.0
    delta: float = 0.0001
    clip_norm: float = 1.0
    num_local_steps: int = 10
    calibration: str = "exact"
    sensitivity: str = "clip-update"
    update_clip_norm: float = 0.0
    smoothness: float = 0.0
    decay_iterations: float = 100.0
    quantization_levels: int = 0
    num_replies: int = 0


def strategy(settings: Settings, own: Own, sizes: Sizes) -> Scaffold:
    """Return the server's side."""
    return Scaffold(**strategy_words(settings, own, sizes))


def client(settings: Settings, own: Own, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "LocalDPClient":
    """Return a node's client."""
    from flower_dp.apps.client_parts import local_client  # noqa: PLC0415 - torch takes a second
    from flower_dp.apps.tasks.models import loss_of  # noqa: PLC0415
    from flower_dp.clients import ScaffoldRecipe  # noqa: PLC0415

    recipe = ScaffoldRecipe(**shared(settings, own), loss=loss_of(settings.model))
    return local_client(settings, recipe, model, clients, max_clip_norm=recipe.steps.sum_norm)
