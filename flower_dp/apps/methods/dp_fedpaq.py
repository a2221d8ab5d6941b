"""DP-FedPAQ and SCAFFOLD: arguments from the settings."""

from typing import Any

from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes, cohort_size_of, local_arguments, sampler_of
from flower_dp.core import checks
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, expected_replies


def arguments(settings: Settings, own: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments of strategy and recipe that several settings decide together."""
    checks.integer("num-replies", own.num_replies, at_least=0)
    if settings.is_set("learning_rate_decay"):
        why = f"is not read by method={settings.method!r}; set {settings.method}.decay-iterations"
        raise checks.refusal("learning-rate-decay", settings.learning_rate_decay, why)
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
    return {**local_arguments(settings, sizes), "steps": steps, "sampling": sampler_of(settings), "num_replies": replies}
