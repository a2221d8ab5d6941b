"""Flower strategies: the server's side of every method."""

from flower_dp.strategies.dp_fedavg import DPFedAvg
from flower_dp.strategies.dp_fedsam import DPFedSAM

__all__ = ["DPFedAvg", "DPFedSAM"]
