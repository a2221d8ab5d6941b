"""DP-FedAvg."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flower_dp.apps.parts import Sizes, client_level_words
from flower_dp.apps.settings import Settings
from flower_dp.strategies import DPFedAvg

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.clients import DPClient, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `dp-fedavg`."""

    clip_norm: float = 0.5
    epsilon: float = 0.0
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


def client(settings: Settings, own: Own, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "DPClient":
    """Return a node's client."""
    from flower_dp.apps.client_parts import client_level_client, training_of  # noqa: PLC0415 - torch takes a second

    return client_level_client(settings, strategy(settings, own, sizes).rules, training_of(settings), model, clients)
