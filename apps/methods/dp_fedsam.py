"""DP-FedSAM and DP-FedSAM-top_k."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from apps.methods import dp_fedavg
from apps.parts import Sizes, training_of
from apps.settings import TRAINING, Settings
from flower_dp.clients import ClientPolicy, DPClient, Records
from flower_dp.strategies import DPFedSAM

READS = TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `dp-fedsam`."""

    clip_norm: float = 0.5
    noise_multiplier: float = 0.9
    delta: float = 0.0
    target_epsilon: float = 8.0
    relation: str = ""
    placement: str = "distributed"
    trusted_server: bool = True
    min_reply_ratio: float = 0.0
    keep_ratio: float = 1.0
    sam_radius: float = 0.05


def strategy(settings: Settings, own: Own, sizes: Sizes) -> DPFedSAM:
    """Return the server's side."""
    return DPFedSAM(
        **dp_fedavg.words(settings, own),
        placement=own.placement,
        keep_ratio=own.keep_ratio,
        trusted_server=own.trusted_server,
        min_reply_ratio=own.min_reply_ratio or None,
    )


def client(settings: Settings, own: Own, model: nn.Module, clients: Mapping[str, Records], sizes: Sizes) -> DPClient:
    """Return a node's client; it accepts what its own run-config says, and nothing weaker."""
    return DPClient(
        model=model,
        clients=clients,
        seed=settings.seed,
        training=training_of(settings, sam_radius=own.sam_radius),
        engine=settings.engine.replace("-", "_"),
        policy=ClientPolicy(
            max_clip_norm=own.clip_norm,
            min_noise_multiplier=own.noise_multiplier,
            min_noise_std=(1 - 1e-9) * strategy(settings, own, sizes).rules.smallest_share,
            allow_metrics=settings.report_client_metrics,
        ),
    )
