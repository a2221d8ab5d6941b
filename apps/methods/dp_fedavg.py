"""DP-FedAvg."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from apps.parts import Sizes, client_level_delta, sampler_of, training_of
from apps.settings import TRAINING, Settings
from flower_dp.clients import ClientPolicy, DPClient, Records
from flower_dp.core import checks
from flower_dp.strategies import DPFedAvg

READS = TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `dp-fedavg`."""

    clip_norm: float = 0.5
    noise_multiplier: float = 0.9
    delta: float = 0.0
    target_epsilon: float = 8.0
    relation: str = ""


def words(settings: Settings, own: Any) -> dict[str, Any]:
    """Return the arguments of every strategy with one noised sum."""
    checks.number("target-epsilon", own.target_epsilon, at_least=0)
    return {
        "clip_norm": own.clip_norm,
        "noise_multiplier": own.noise_multiplier,
        "sampling": sampler_of(settings),
        "num_clients": settings.num_clients,
        "delta": client_level_delta(own.delta, settings, private=bool(own.noise_multiplier)),
        "target_epsilon": own.target_epsilon or None,
        "relation": own.relation or None,
        "report_client_metrics": settings.report_client_metrics,
    }


def strategy(settings: Settings, own: Own, sizes: Sizes) -> DPFedAvg:
    """Return the server's side."""
    return DPFedAvg(**words(settings, own))


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
            allow_metrics=settings.report_client_metrics,
        ),
    )
