"""The client side of every method with one noised sum of clipped updates, by its name: one line a method. Without torch."""

from collections.abc import Mapping

from flower_dp.clients import dp_fedavg, fed_smp
from flower_dp.clients.client_level import ClientLevelMethod

# What `DPClient` and `privacy_mod` run: how an instruction becomes a pipeline.
CLIENT_LEVEL: Mapping[str, ClientLevelMethod] = {
    "dp-fedavg": dp_fedavg.pipeline,
    "dp-fedsam": dp_fedavg.pipeline,
    "fed-smp": fed_smp.pipeline,
}
