"""The parts of a run: strings and numbers of the run-config become a strategy and a node's client here and nowhere else."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from apps.settings import Settings
from flower_dp.clients import ClientPolicy, DPClient, FedSGDDPCRecipe, LocalDPClient, LocalTraining, NbAFLRecipe, Records
from flower_dp.clients.client import NodeClient
from flower_dp.clients.local import LocalRecipe
from flower_dp.core import checks
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.privacy.accounting import relation_of
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSGDDPC, NbAFL
from flower_dp.strategies.strategy import DPStrategy

Sizes = Mapping[str, int]


def strategy_of(settings: Settings, sizes: Callable[[], Sizes]) -> DPStrategy:
    """Return the server's side of the method.

    Args:
        settings: the run's settings.
        sizes: returns every client's number of records, which methods with local noise take as public; called by these alone.

    Raises:
        ValueError: for settings that make no sense for this method, naming field and value.
    """
    if settings.method == "fedsgd-dpc":
        return _fedsgd_dpc(settings, sizes())
    if settings.method == "nbafl":
        return _nbafl(settings, sizes())
    return _client_level(settings)


def _client_level(settings: Settings) -> DPFedAvg | DPFedSAM:
    common: dict[str, Any] = {
        "clip_norm": settings.clip_norm,
        "noise_multiplier": settings.noise_multiplier,
        "sampling": _sampler(settings),
        "num_clients": settings.num_clients,
        "delta": settings.effective_delta,
        "target_epsilon": settings.target_epsilon or None,
        "relation": settings.relation or None,
        "report_client_metrics": settings.report_client_metrics,
    }
    if settings.method == "dp-fedavg":
        return DPFedAvg(**common)
    return DPFedSAM(
        **common,
        placement=settings.placement or "distributed",
        keep_ratio=settings.keep_ratio,
        trusted_server=settings.trusted_server,
        min_reply_ratio=settings.min_reply_ratio or None,
    )


def client_of(settings: Settings, model: nn.Module, clients: Mapping[str, Records], sizes: Callable[[], Sizes]) -> NodeClient:
    """Return the client of one node: of the method's kind, around the records of those who live there."""
    words: dict[str, Any] = {"model": model, "clients": clients, "seed": settings.seed}
    if settings.method not in ("fedsgd-dpc", "nbafl"):
        # A simulated client accepts what its own run-config says, and nothing weaker.
        policy = ClientPolicy(
            max_clip_norm=settings.clip_norm,
            min_noise_multiplier=settings.noise_multiplier,
            min_noise_std=(1 - 1e-9) * _client_level(settings).rules.smallest_share,
            allow_metrics=settings.report_client_metrics,
        )
        return DPClient(**words, training=training_of(settings), policy=policy, engine=settings.engine.replace("-", "_"))
    policy = ClientPolicy(max_clip_norm=settings.clip_norm, allow_metrics=settings.report_client_metrics)
    return LocalDPClient(**words, recipe=_recipe(settings, sizes), policy=policy)


def training_of(settings: Settings) -> LocalTraining:
    """Return the recipe of local training."""
    return LocalTraining(
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        num_local_epochs=settings.local_epochs,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        learning_rate_decay=settings.learning_rate_decay,
        sam_radius=settings.sam_radius if settings.method == "dp-fedsam" else 0.0,
        proximal=settings.proximal,
    )


def _sampler(settings: Settings) -> Sampler:
    if settings.sampling == "full":
        return FullSampling()
    if settings.sampling == "poisson":
        return PoissonSampling(sampling_rate=settings.sampling_rate)
    size = _cohort_size(settings)
    return FixedSizeSampling(cohort_size=size) if settings.sampling == "fixed-size" else RoundRobinSampling(cohort_size=size)


def _cohort_size(settings: Settings) -> int:
    return checks.integer("cohort-size", settings.cohort_size, at_least=1, at_most=settings.num_clients)


def _recipe(settings: Settings, sizes: Callable[[], Sizes]) -> LocalRecipe:
    if settings.method == "fedsgd-dpc":
        return FedSGDDPCRecipe(
            mechanism=settings.mechanism,
            clip_norm=settings.clip_norm,
            epsilon=settings.budgets(),
            delta=settings.delta,
            num_replies=_replies(settings),
            num_records=dict(sizes()),
            sampling_rate=settings.record_sampling_rate,
            relation=relation_of(settings.relation or "replace-one"),
        )
    return NbAFLRecipe(
        training=training_of(settings),
        clip_norm=settings.clip_norm,
        epsilon=settings.epsilon,
        delta=settings.delta,
        uplink_exposures=_exposures(settings),
        min_records=min(sizes().values()),
        num_replies=_replies(settings),
    )


def _fedsgd_dpc(settings: Settings, sizes: Sizes) -> FedSGDDPC:
    checks.one_of("sampling", settings.sampling, ("round-robin",))
    theory = bool(settings.strong_convexity or settings.smoothness)
    return FedSGDDPC(
        mechanism=settings.mechanism,
        num_clients=settings.num_clients,
        cohort_size=_cohort_size(settings),
        num_records=dict(sizes),
        clip_norm=settings.clip_norm,
        epsilon=settings.budgets(),
        learning_rate=None if theory else settings.learning_rate,
        delta=settings.delta,
        learning_rate_decay=settings.learning_rate_decay,
        strong_convexity=settings.strong_convexity if theory else None,
        smoothness=settings.smoothness if theory else None,
        aggregation=settings.aggregation,
        sampling_rate=settings.record_sampling_rate,
        relation=relation_of(settings.relation or "replace-one"),
        num_replies=_replies(settings),
        noise_constant=settings.noise_constant or None,
        report_client_metrics=settings.report_client_metrics,
    )


def _nbafl(settings: Settings, sizes: Sizes) -> NbAFL:
    checks.one_of("sampling", settings.sampling, ("full", "fixed-size"))
    checks.one_of("relation", settings.relation, ("", "replace-one"))
    if settings.client_epsilons:
        raise ValueError(f"client-epsilons={settings.client_epsilons!r}: must be empty for method='nbafl', which has one epsilon")
    return NbAFL(
        num_clients=settings.num_clients,
        num_records=dict(sizes),
        clip_norm=settings.clip_norm,
        epsilon=settings.epsilon,
        delta=settings.delta,
        uplink_exposures=_exposures(settings),
        cohort_size=None if settings.sampling == "full" else _cohort_size(settings),
        num_replies=_replies(settings),
        aggregation=settings.aggregation,
        report_client_metrics=settings.report_client_metrics,
    )


def _replies(settings: Settings) -> int:
    """Return the most replies of one client: as set, or as many as the noise is made for."""
    if settings.num_replies:
        return settings.num_replies
    if settings.method == "nbafl":
        return _exposures(settings)
    return max(1, -(-settings.num_rounds * _cohort_size(settings) // settings.num_clients))


def _exposures(settings: Settings) -> int:
    return settings.uplink_exposures or max(1, settings.num_rounds)
