"""DP-FedPAQ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_dp.apps.parts import Sizes, cohort_size_of, local_words, sampler_of
from flower_dp.apps.settings import Settings
from flower_dp.core import checks
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, expected_replies
from flower_dp.strategies import DPFedPAQ

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.clients import LocalDPClient, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `dp-fedpaq`."""

    epsilon: float = 4.0
    delta: float = 0.0001
    clip_norm: float = 1.0
    num_local_steps: int = 10
    calibration: str = "exact"
    sensitivity: str = "clip-update"
    update_clip_norm: float = 0.0
    smoothness: float = 0.0
    decay_iterations: float = 100.0
    quantization_levels: int = 10
    num_replies: int = 0


def strategy(settings: Settings, own: Own, sizes: Sizes) -> DPFedPAQ:
    """Return the server's side."""
    return DPFedPAQ(**strategy_words(settings, own, sizes))


def client(settings: Settings, own: Own, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "LocalDPClient":
    """Return a node's client."""
    from flower_dp.apps.client_parts import local_client  # noqa: PLC0415 - torch takes a second
    from flower_dp.apps.tasks.models import loss_of  # noqa: PLC0415
    from flower_dp.clients import DPFedPAQRecipe  # noqa: PLC0415

    recipe = DPFedPAQRecipe(**shared(settings, own), loss=loss_of(settings.model))
    return local_client(settings, recipe, model, clients, max_clip_norm=recipe.steps.sum_norm)


def strategy_words(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of the strategy."""
    return {
        **shared(settings, own),
        "sampling": sampler_of(settings),
        **local_words(settings, sizes),
    }


def shared(settings: Settings, own: Any) -> dict[str, Any]:
    """Return what both sides must agree on."""
    checks.integer("num-replies", own.num_replies, at_least=0)
    if settings.is_set("learning_rate_decay"):
        raise ValueError(
            f"learning-rate-decay={settings.learning_rate_decay:g}: is not read by method={settings.method!r}; "
            f"set {settings.method}.decay-iterations"
        )
    checks.integer("quantization-levels", own.quantization_levels, at_least=0)
    cohort_size = settings.num_clients if settings.sampling == "full" else cohort_size_of(settings)
    replies = own.num_replies or expected_replies(
        settings.num_rounds, cohort_size, settings.num_clients, at_random=settings.sampling == "fixed-size"
    )
    steps = FedPAQSteps(
        learning_rate=settings.learning_rate,
        num_local_steps=own.num_local_steps,
        batch_size=settings.batch_size,
        clip_norm=own.clip_norm,
        sensitivity=own.sensitivity,
        update_clip_norm=own.update_clip_norm or None,
        smoothness=own.smoothness or None,
        decay_iterations=own.decay_iterations or None,
    )
    return {
        "steps": steps,
        "epsilon": own.epsilon,
        "delta": own.delta,
        "calibration": own.calibration,
        "num_replies": replies,
        "quantization_levels": own.quantization_levels or None,
    }
