"""Flower clients: local training, clipping, noise on the device.

Names that need torch are imported on first use: `privacy_mod`, policy and terms work on a device without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_dp.clients.nbafl_weights import NbAFLTerms
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.wrapped.mod import privacy_mod
from flower_dp.privacy.evaluation_budget import EvaluationBudget

if TYPE_CHECKING:
    from flower_dp.clients.app import client_app
    from flower_dp.clients.client import DPClient
    from flower_dp.clients.dp_fedpaq import DPFedPAQRecipe
    from flower_dp.clients.dp_pasgd import DPPASGDRecipe
    from flower_dp.clients.fedsgd_dpc import FedSGDDPCRecipe
    from flower_dp.clients.local.client import LocalDPClient
    from flower_dp.clients.local.evaluation import RecordMetrics
    from flower_dp.clients.nbafl import NbAFLRecipe
    from flower_dp.clients.scaffold import ScaffoldRecipe
    from flower_dp.clients.training.batchnorm import fix_batchnorm
    from flower_dp.clients.training.engines import local_updates
    from flower_dp.clients.training.recipe import FlatModel, Training, model_arrays
    from flower_dp.clients.training.records import DatasetRecords, Records, TensorRecords, as_records
    from flower_dp.clients.training.regularizers import BLUR, LUS, ProximalTerm, Regularizer

# fmt: off
__all__ = [
    "BLUR", "LUS", "ClientPolicy", "DPClient", "DPFedPAQRecipe", "DPPASGDRecipe", "DatasetRecords", "EvaluationBudget",
    "FedSGDDPCRecipe", "FlatModel", "LocalDPClient", "NbAFLRecipe", "NbAFLTerms", "ProximalTerm", "RecordMetrics",
    "Records", "Regularizer", "ScaffoldRecipe", "TensorRecords", "Training", "as_records", "client_app", "fix_batchnorm",
    "local_updates", "model_arrays", "privacy_mod",
]
# fmt: on

# Names that need torch, by their modules here.
_WITH_TORCH = {
    "app": "client_app",
    "client": "DPClient",
    "dp_fedpaq": "DPFedPAQRecipe",
    "dp_pasgd": "DPPASGDRecipe",
    "fedsgd_dpc": "FedSGDDPCRecipe",
    "local.client": "LocalDPClient",
    "local.evaluation": "RecordMetrics",
    "nbafl": "NbAFLRecipe",
    "scaffold": "ScaffoldRecipe",
    "training.engines": "local_updates",
    "training.batchnorm": "fix_batchnorm",
    "training.recipe": "FlatModel Training model_arrays",
    "training.records": "DatasetRecords Records TensorRecords as_records",
    "training.regularizers": "BLUR LUS ProximalTerm Regularizer",
}
_MODULES = {name: module for module, names in _WITH_TORCH.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name that needs torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{name} needs torch: pip install 'flower-dp[torch]'; privacy_mod works without it") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
