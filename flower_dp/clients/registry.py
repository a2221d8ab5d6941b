"""The client side of every method, by its name: one line a method."""

from collections.abc import Mapping

from flower_dp.clients import dp_fedavg, fed_smp
from flower_dp.clients.client_level import ClientLevelMethod
from flower_dp.clients.dp_fedpaq import DPFedPAQRecipe
from flower_dp.clients.fedsgd_dpc import FedSGDDPCRecipe
from flower_dp.clients.local_recipe import LocalRecipe
from flower_dp.clients.nbafl import NbAFLRecipe
from flower_dp.clients.scaffold import ScaffoldRecipe

# What `DPClient` runs: how an instruction becomes a pipeline.
CLIENT_LEVEL: Mapping[str, ClientLevelMethod] = {
    "dp-fedavg": dp_fedavg.pipeline,
    "dp-fedsam": dp_fedavg.pipeline,
    "fed-smp": fed_smp.pipeline,
}

# What `LocalDPClient` runs: a recipe holds the client's own terms, by which its pipeline is made.
LOCAL: Mapping[str, type[LocalRecipe]] = {
    "dp-fedpaq": DPFedPAQRecipe,
    "fedsgd-dpc": FedSGDDPCRecipe,
    "nbafl": NbAFLRecipe,
    "scaffold": ScaffoldRecipe,
}
