"""FedSGD-DPC, Laplace and Gaussian."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flower_dp.apps.parts import Sizes, cohort_size_of, local_words, per_client
from flower_dp.apps.settings import Settings
from flower_dp.core import checks
from flower_dp.planning.planner import Data, Inputs
from flower_dp.privacy.accounting import relation_of
from flower_dp.strategies import FedSGDDPC

if TYPE_CHECKING:
    from torch import nn

    from flower_dp.clients import LocalDPClient, Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The table `fedsgd-dpc`."""

    mechanism: str = "laplace"
    clip_norm: float = 0.5
    epsilon: float = 1.0
    client_epsilons: str = ""
    delta: float = 0.0
    record_sampling_rate: float = 1.0
    num_replies: int = 0
    aggregation: str = "data-size"
    relation: str = "replace-one"
    strong_convexity: float = 0.0
    smoothness: float = 0.0
    noise_constant: float = 0.0


def strategy(settings: Settings, own: Own, sizes: Sizes) -> FedSGDDPC:
    """Return the server's side."""
    theory = bool(own.strong_convexity or own.smoothness)
    return FedSGDDPC(
        **_shared(settings, own),
        **local_words(settings, sizes),
        cohort_size=cohort_size_of(settings),
        learning_rate=None if theory else settings.learning_rate,
        learning_rate_decay=settings.learning_rate_decay,
        strong_convexity=own.strong_convexity if theory else None,
        smoothness=own.smoothness if theory else None,
        aggregation=own.aggregation,
        noise_constant=own.noise_constant or None,
    )


def client(settings: Settings, own: Own, model: "nn.Module", clients: "Mapping[str, Records]", sizes: Sizes) -> "LocalDPClient":
    """Return a node's client."""
    from flower_dp.apps.client_parts import local_client  # noqa: PLC0415 - torch takes a second
    from flower_dp.apps.tasks.models import loss_of  # noqa: PLC0415
    from flower_dp.clients import FedSGDDPCRecipe  # noqa: PLC0415

    recipe = FedSGDDPCRecipe(**_shared(settings, own), num_records=dict(sizes()), loss=loss_of(settings.model))
    return local_client(settings, recipe, model, clients, max_clip_norm=own.clip_norm)


def planning(settings: Settings, own: Own, data: Data, given: Mapping[str, object]) -> Inputs:
    """Return what a preset says of its planning problem."""
    epsilons = per_client(settings, "client-epsilons", own.client_epsilons, own.epsilon)
    values: dict[str, object] = {
        "mechanism": own.mechanism,
        "clip_norm": own.clip_norm,
        "epsilon": list(epsilons.values()) if own.client_epsilons else own.epsilon,
    }
    notes = []
    if given.get("mechanism", own.mechanism) == "gaussian":
        values["sampling_rate"] = own.record_sampling_rate
        if own.delta:
            values["delta"] = own.delta
        if own.noise_constant:
            values["noise_constant"] = own.noise_constant
        if not {"num_rounds", "max_rounds"} & given.keys():
            values["max_rounds"] = settings.num_rounds
            notes.append(f"max_rounds={settings.num_rounds} is the preset's num-rounds")
    return Inputs(values=values, notes=tuple(notes))


def _shared(settings: Settings, own: Own) -> dict[str, Any]:
    """Return what both sides must agree on."""
    checks.integer("num-replies", own.num_replies, at_least=0)
    replies = own.num_replies or max(1, -(-settings.num_rounds * cohort_size_of(settings) // settings.num_clients))
    return {
        "mechanism": own.mechanism,
        "clip_norm": own.clip_norm,
        "epsilon": per_client(settings, "client-epsilons", own.client_epsilons, own.epsilon),
        "delta": own.delta,
        "num_replies": replies,
        "sampling_rate": own.record_sampling_rate,
        "relation": relation_of(own.relation),
    }
