"""Fed-SMP with rand_k."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from apps.methods import dp_fedavg
from apps.parts import Sizes, training_of
from apps.settings import TRAINING, Settings
from flower_dp.clients import ClientPolicy, DPClient, Records
from flower_dp.strategies import FedSMP

READS = TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `fed-smp`."""

    clip_norm: float = 0.5
    noise_multiplier: float = 0.9
    delta: float = 0.0
    target_epsilon: float = 8.0
    relation: str = ""
    placement: str = "distributed"
    keep_ratio: float = 0.4


def strategy(settings: Settings, own: Own, sizes: Sizes) -> FedSMP:
    """Return the server's side."""
    return FedSMP(**dp_fedavg.words(settings, own), placement=own.placement, keep_ratio=own.keep_ratio)


def client(settings: Settings, own: Own, model: nn.Module, clients: Mapping[str, Records], sizes: Sizes) -> DPClient:
    """Return a node's client; it accepts what its own run-config says, and nothing weaker."""
    return DPClient(
        model=model,
        clients=clients,
        seed=settings.seed,
        training=training_of(settings),
        engine=settings.engine.replace("-", "_"),
        policy=ClientPolicy(
            max_clip_norm=own.clip_norm,
            min_noise_multiplier=own.noise_multiplier,
            min_noise_std=(1 - 1e-9) * strategy(settings, own, sizes).rules.smallest_share,
            allow_metrics=settings.report_client_metrics,
        ),
    )
