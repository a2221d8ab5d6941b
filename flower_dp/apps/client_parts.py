"""Make a node's client from the settings. It is imported only when a client is made, because torch loads slowly."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from flower_dp import clients as parts
from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes, evaluation_budget_of
from flower_dp.apps.tasks.models import loss_of, predictions
from flower_dp.clients.local.evaluation import record_loss_and_accuracy
from flower_dp.clients.local.recipe import LocalRecipe
from flower_dp.clients.reply.evaluation import loss_and_accuracy
from flower_dp.clients.training.losses import Loss
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.privacy.release import Release
from flower_dp.strategies.client_level import ClientLevelRules

# A group has room for the expected number of selected clients of a node, and so many standard deviations more.
_SPREAD = 3
# The relative difference of noise multipliers of correlated noise: another processor may find a slightly different matrix.
_MATRIX = 1e-3


def training_of(settings: Settings, *, sam_radius: float = 0.0, loss: Loss | None = None) -> parts.Training:
    """Return the recipe of local training, by default with the loss of the task's model."""
    regularizers: list[parts.Regularizer] = []
    if settings.proximal_mu:
        regularizers.append(parts.ProximalTerm(strength=settings.proximal_mu))
    if settings.blur_strength:
        regularizers.append(parts.BLUR(strength=settings.blur_strength, bound=settings.blur_bound))
    keep_ratio = settings.lus_keep_ratio
    return parts.Training(
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        num_local_epochs=settings.local_epochs,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        learning_rate_decay=settings.learning_rate_decay,
        sam_radius=sam_radius,
        regularizers=tuple(regularizers),
        sparsifier=None if keep_ratio == 1 else parts.LUS(keep_ratio=keep_ratio),
        loss=loss or loss_of(settings.model),
        optimizer=settings.optimizer,
    )


def local_client(
    settings: Settings,
    kind: Callable[..., LocalRecipe],
    arguments: Mapping[str, Any],
    model: parts.FlatModel | nn.Module,
    clients: Mapping[str, parts.Records],
    sizes: Sizes,
    loss: Loss | None,
) -> parts.LocalDPClient:
    """Return a node's client for a method with a budget per client; its recipe has the strategy's arguments."""
    made: dict[str, Callable[[], Any]] = {
        "loss": lambda: loss or loss_of(settings.model),
        "training": lambda: training_of(settings, loss=loss),
        "min_records": lambda: min(sizes().values()),
    }
    names = inspect.signature(kind).parameters
    given = {name: value for name, value in arguments.items() if name in names}
    recipe: Any = kind(**given, **{name: make() for name, make in made.items() if name in names})
    # The metrics below are of the task's models; with a user's own loss the recipe's metrics are taken.
    labels = partial(predictions, settings.model)
    metrics = None if loss else record_loss_and_accuracy(loss_of(settings.model), labels=labels)
    max_clip_norm = recipe.steps.sum_norm if "steps" in names else recipe.clip_norm
    return parts.LocalDPClient(
        model=model,
        clients=clients,
        recipe=recipe,
        seed=settings.seed,
        evaluation=evaluation_budget_of(settings),
        record_metrics=metrics,
        policy=parts.ClientPolicy(max_clip_norm=max_clip_norm, allow_metrics=settings.report_client_metrics),
    )


def _group_size(release: Release, num_hosted: int) -> int:
    """Return the number of a node's clients that a round rarely exceeds. It must not depend on the clients selected."""
    sampler, num_clients = release.sampler, release.num_units
    expected = sampler.expected_cohort_size(num_clients) * num_hosted / num_clients
    fixed = num_hosted == num_clients and sampler.max_cohort_size(num_clients) == expected
    return min(num_hosted, math.ceil(expected if fixed else expected + _SPREAD * math.sqrt(expected)))


def client_level_client(
    settings: Settings,
    rules: ClientLevelRules,
    model: parts.FlatModel | nn.Module,
    clients: Mapping[str, parts.Records],
    sam_radius: float,
    loss: Loss | None,
) -> parts.DPClient:
    """Return a node's client for rules with one noised sum; it refuses less protection than its own run-config gives."""
    evaluating = rules.evaluation
    smallest, largest = rules.clip_norms
    training = training_of(settings, sam_radius=sam_radius, loss=loss)
    correlated = bool(rules.noise.num_rounds_of_event)
    kept = rules.release.sampler if isinstance(rules.release.sampler, MinimumSeparationSampling) else None
    return parts.DPClient(
        model=model,
        clients=clients,
        seed=settings.seed,
        training=training,
        training_engine=settings.training_engine.replace("-", "_"),
        group_size=_group_size(rules.release, len(clients)),
        metrics=loss_and_accuracy(training.loss, labels=None if loss else partial(predictions, settings.model)),
        policy=parts.ClientPolicy(
            max_clip_norm=largest,
            min_clip_norm=smallest if smallest < largest else None,
            min_noise_multiplier=(1 - _MATRIX * correlated) * rules.noise.promised_multiplier,
            min_noise_std=(1 - 1e-9) * rules.noise.min_share_std * (largest / rules.release.clip_norm),
            allow_metrics=settings.report_client_metrics,
            whole_run=correlated,
            min_separation=kept.min_separation if kept else None,
            max_participations=kept.max_participations if kept else None,
            allow_evaluation=evaluating is not None,
            min_evaluation_noise_multiplier=evaluating.release.mechanism.noise_multiplier if evaluating else 0.0,
            min_evaluation_noise_std=(1 - 1e-9) * evaluating.noise.min_share_std if evaluating else 0.0,
        ),
    )
