"""DP-FedAvg."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from apps.parts import Sizes, client_level_client, client_level_words, training_of
from apps.settings import TRAINING, Settings
from flower_dp.clients import DPClient, Records
from flower_dp.strategies import DPFedAvg

READS = TRAINING
UNSET = ("Training.sam_radius",)
OTHER_DEFAULTS = ("DPFedAvg.target_epsilon",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `dp-fedavg`."""

    clip_norm: float = 0.5
    noise_multiplier: float = 0.9
    delta: float = 0.0
    target_epsilon: float = 8.0
    relation: str = ""
    clip_quantile: float = 0.0
    clip_learning_rate: float = 0.2
    clip_count_noise_std: float = 0.0
    smallest_clip_norm: float = 0.0
    largest_clip_norm: float = 0.0
    placement: str = "central"
    trusted_server: bool = True
    min_reply_ratio: float = 0.0


def strategy(settings: Settings, own: Own, sizes: Sizes) -> DPFedAvg:
    """Return the server's side."""
    return DPFedAvg(**client_level_words(settings, own))


def client(settings: Settings, own: Own, model: nn.Module, clients: Mapping[str, Records], sizes: Sizes) -> DPClient:
    """Return a node's client."""
    return client_level_client(settings, strategy(settings, own, sizes).rules, training_of(settings), model, clients)
