"""The client side of every method, by its name: one line a method."""

from collections.abc import Mapping

from flower_dp.clients.dp_fedpaq import DPFedPAQRecipe
from flower_dp.clients.dp_pasgd import DPPASGDRecipe
from flower_dp.clients.fedsgd_dpc import FedSGDDPCRecipe
from flower_dp.clients.local.recipe import LocalRecipe
from flower_dp.clients.nbafl import NbAFLRecipe
from flower_dp.clients.reply.client_level import CLIENT_LEVEL
from flower_dp.clients.scaffold import ScaffoldRecipe

__all__ = ["CLIENT_LEVEL", "LOCAL"]

# What `LocalDPClient` runs: a recipe holds the client's own terms, by which its pipeline is made.
LOCAL: Mapping[str, type[LocalRecipe]] = {
    "dp-fedpaq": DPFedPAQRecipe,
    "dp-pasgd": DPPASGDRecipe,
    "fedsgd-dpc": FedSGDDPCRecipe,
    "nbafl": NbAFLRecipe,
    "scaffold": ScaffoldRecipe,
}
