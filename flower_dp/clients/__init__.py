"""Flower clients: local training, clipping, noise on the device."""

from flower_dp.clients.app import client_app
from flower_dp.clients.client import DPClient
from flower_dp.clients.dp_fedpaq import DPFedPAQRecipe
from flower_dp.clients.engines import local_updates
from flower_dp.clients.fedsgd_dpc import FedSGDDPCRecipe
from flower_dp.clients.local import LocalDPClient
from flower_dp.clients.nbafl import NbAFLRecipe
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.records import Records, TensorRecords
from flower_dp.clients.scaffold import ScaffoldRecipe
from flower_dp.clients.training import FlatModel, LocalTraining, model_arrays

__all__ = [
    "ClientPolicy",
    "DPClient",
    "DPFedPAQRecipe",
    "FedSGDDPCRecipe",
    "FlatModel",
    "LocalDPClient",
    "LocalTraining",
    "NbAFLRecipe",
    "Records",
    "ScaffoldRecipe",
    "TensorRecords",
    "client_app",
    "local_updates",
    "model_arrays",
]
