"""Flower strategies: the server's side of every method."""

from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.planning.correlated_noise import BISR, BLT, Banded, Tree
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.strategies.dp_fedavg import DPFedAvg
from flower_dp.strategies.dp_fedpaq import DPFedPAQ
from flower_dp.strategies.dp_fedsam import DPFedSAM
from flower_dp.strategies.dp_ftrl import DPFTRL
from flower_dp.strategies.dp_pasgd import DPPASGD
from flower_dp.strategies.evaluation import LocalEvaluation, PrivateEvaluation
from flower_dp.strategies.fed_smp import FedSMP
from flower_dp.strategies.fedsgd_dpc import FedSGDDPC
from flower_dp.strategies.nbafl import NbAFL
from flower_dp.strategies.releases.adaptive_clip import AdaptiveClip
from flower_dp.strategies.scaffold import Scaffold
from flower_dp.strategies.strategy import DPStrategy

__all__ = [
    "BISR",
    "BLT",
    "DPFTRL",
    "DPPASGD",
    "AdaptiveClip",
    "Banded",
    "DPFedAvg",
    "DPFedPAQ",
    "DPFedSAM",
    "DPStrategy",
    "EvaluationBudget",
    "FedSGDDPC",
    "FedSMP",
    "LocalEvaluation",
    "MinimumSeparationSampling",
    "NbAFL",
    "PrivateEvaluation",
    "Scaffold",
    "Tree",
]
