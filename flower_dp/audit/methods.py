"""How each method becomes a case: its strategy, its clients, and the neighbouring inputs that its relation allows."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from flower_dp.audit import worst_case
from flower_dp.audit.case import Case
from flower_dp.clients import (
    BLUR,
    LUS,
    DPClient,
    DPFedPAQRecipe,
    DPPASGDRecipe,
    FedSGDDPCRecipe,
    LocalDPClient,
    NbAFLRecipe,
    ScaffoldRecipe,
    Training,
)
from flower_dp.clients.local.recipe import LocalRecipe
from flower_dp.clients.node_client import NodeClient
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, Sampler
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.events import Relation
from flower_dp.strategies import (
    DPPASGD,
    AdaptiveClip,
    DPFedAvg,
    DPFedPAQ,
    DPStrategy,
    FedSGDDPC,
    NbAFL,
    Scaffold,
)

DELTA = 1e-3
_EPSILON = 8.0
CLIP_NORM = 1.0
# With shares of noise / n in the place of noise / sqrt(n), a participant among n clients meets noise that is sqrt(n) times too
# small with the unit, and sqrt(n / 2) times without it: among two that is none at all without it, for the server adds its share.
_SHARING = 4
TRAINING = Training(learning_rate=1.0, batch_size=1, loss=worst_case.loss)
SAM = replace(TRAINING, sam_radius=0.05)
BLURS = replace(TRAINING, regularizers=(BLUR(strength=0.1, bound=0.01),), sparsifier=LUS(keep_ratio=0.5))


def client_level(
    label: str,
    make: Callable[..., DPStrategy],
    *,
    noise_multiplier: float,
    clip_norm: float | AdaptiveClip = CLIP_NORM,
    delta: float = DELTA,
    sampling: Sampler | None = None,
    num_rounds: int = 1,
    training: Training | None = TRAINING,
    inputs: float = 1.0,
    post_processed: bool = False,
    **own: Any,
) -> Case:
    """Return the case of a method with one noised sum: two clients, one of which is the unit; four where they share the noise.

    Under add-or-remove-one the unit does not answer in the neighbouring input; where who answers may be known, it answers with an
    update of zero, as the statement says. Under replace-one its update points into the opposite direction. A second client's
    update, against the unit's, is the same in both, and those of further clients are zero. With sampling there is one round, and
    all others' updates are that of the neighbouring input: then a cohort without the unit can't be told from it.

    Clients that send the largest coordinates or the levels of their own noised updates are two in any case: each is protected by
    its own share alone, and the noise of others would hide that. Without a trusted server all must answer, so that there are no
    more shares than are charged.

    Args:
        label: of the case.
        make: the strategy.
        noise_multiplier: noise std / clip norm.
        clip_norm: L2 bound.
        delta: of the claim.
        sampling: who takes part; None: everybody.
        num_rounds: of a run.
        training: the clients' recipe; None: stock clients.
        inputs: which parameters are pushed.
        post_processed: see `Case`.
        own: further arguments of the strategy.
    """
    sampling = FullSampling() if sampling is None else sampling
    replaced = (own.get("relation") or sampling_relation(sampling)) == "replace-one"
    central = own.get("placement", "central" if make is DPFedAvg else "distributed") == "central"
    full = isinstance(sampling, FullSampling)
    shows = not central and (not own.get("trusted_server", True) or post_processed)
    without = -1.0 if replaced else 0.0
    num_clients = clients_of(central=central, lossy=post_processed)
    if not central and not own.get("trusted_server", True):
        own = {"min_reply_ratio": 1.0, **own}
    others = (-1.0, *(num_clients - 2) * (0.0,)) if full else (num_clients - 1) * (without,)

    def strategy() -> DPStrategy:
        return make(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            num_clients=num_clients,
            delta=delta,
            **own,
        )

    def client(**node: Any) -> DPClient:
        assert training is not None  # noqa: S101 (else clients are stock ones)
        return DPClient(**node, training=training, device="cpu")

    return Case(
        label=label,
        method=strategy().rules.training.name,
        strategy=strategy,
        client=None if training is None else client,
        present=(1.0, *others),
        absent=(without, *others),
        silent=not replaced and not shows,
        view="outsider" if central else "participant",
        num_rounds=num_rounds if full else 1,
        inputs=inputs,
        post_processed=post_processed,
    )


def clients_of(*, central: bool, lossy: bool) -> int:
    """Return how many clients a case of a noised sum has: two, or more where they share its noise."""
    return 2 if central or lossy else _SHARING


def sampling_relation(sampling: Sampler) -> Relation:
    """Return the relation that a strategy takes by default."""
    return "replace-one" if isinstance(sampling, FixedSizeSampling) else "add-or-remove-one"


def local(
    label: str,
    method: str,
    recipe: Callable[[], LocalRecipe],
    strategy: Callable[[], DPStrategy],
    *,
    num_rounds: int = 1,
    num_records: int = 1,
    without: float = -1.0,
    inputs: float = 1.0,
    post_processed: bool = False,
) -> Case:
    """Return the case of a method whose messages are private one by one: one client, whose messages the server sees.

    Args:
        label: of the case.
        method: the method's name on the wire.
        recipe: makes the client's recipe, once, when the first client is made: it may calibrate its noise.
        strategy: makes the strategy.
        num_rounds: of a run.
        num_records: of the client.
        without: what the unit pushes in the neighbouring input: -1 where it is replaced, 0 where it is left out.
        inputs: which parameters are pushed.
        post_processed: see `Case`.
    """
    made = cache(recipe)

    def client(**node: Any) -> NodeClient:
        return LocalDPClient(**node, recipe=made(), device="cpu")

    return Case(
        label=label,
        method=method,
        strategy=strategy,
        client=client,
        present=(1.0,),
        absent=(without,),
        view="server",
        num_rounds=num_rounds,
        num_records=num_records,
        inputs=inputs,
        post_processed=post_processed,
    )


def fedsgd_dpc(
    label: str,
    *,
    mechanism: str,
    epsilon: float = _EPSILON,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    sampling_rate: float = 1.0,
    relation: Relation = "replace-one",
    num_rounds: int = 1,
) -> Case:
    """Return the case of FedSGD-DPC: one client with one record."""
    shared: dict[str, Any] = {
        "mechanism": mechanism,
        "clip_norm": clip_norm,
        "epsilon": epsilon,
        "delta": 0.0 if mechanism == "laplace" else delta,
        "num_records": 1,
        "num_replies": num_rounds,
        "sampling_rate": sampling_rate,
        "relation": relation,
    }
    return local(
        label,
        FedSGDDPCRecipe.method,
        lambda: FedSGDDPCRecipe(**shared, loss=worst_case.loss),
        lambda: FedSGDDPC(**shared, num_clients=1, cohort_size=1, learning_rate=1.0),
        num_rounds=num_rounds,
        without=-1.0 if relation == "replace-one" else 0.0,
        inputs=0.0 if mechanism == "laplace" else 1.0,  # in L1 the worst change is that of one coordinate
    )


def local_steps(
    label: str,
    *,
    scaffold: bool = False,
    epsilon: float = _EPSILON,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    quantization_levels: int | None = None,
    num_rounds: int = 1,
    sensitivity: str = "clip-update",
) -> Case:
    """Return the case of DP-FedPAQ or SCAFFOLD.

    With an update clip it is one that a single record can reach, in two local steps. The other proofs of the sensitivity have
    the clip of records alone: in one step a record reaches what they prove.
    """
    rate, clipped = 0.5, sensitivity == "clip-update"
    convex = sensitivity == "convex-glm"
    loss = nn.functional.mse_loss if convex else worst_case.loss
    steps = FedPAQSteps(
        learning_rate=rate,
        num_local_steps=2 if clipped else 1,
        # Of one record alone, the bound on the whole sum under convex-glm would hide that a clip is missing.
        batch_size=8 if convex else 1,
        clip_norm=clip_norm,
        sensitivity=sensitivity,
        update_clip_norm=rate * clip_norm if clipped else None,
        smoothness=2 / rate if convex else None,  # of the squared error of features up to 1, with a bias
        decay_iterations=None,
    )
    shared: dict[str, Any] = {"steps": steps, "epsilon": epsilon, "delta": delta, "quantization_levels": quantization_levels}
    recipe, make = (ScaffoldRecipe, Scaffold) if scaffold else (DPFedPAQRecipe, DPFedPAQ)
    return local(
        label,
        recipe.method,
        lambda: recipe(**shared, num_replies=num_rounds, loss=loss),
        lambda: make(**shared, sampling=FullSampling(), num_clients=1, num_records=steps.num_records, num_replies=num_rounds),
        num_rounds=num_rounds,
        num_records=steps.num_records,
        post_processed=quantization_levels is not None,
    )


def dp_pasgd(
    label: str,
    *,
    num_local_steps: int,
    epsilon: float = _EPSILON,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    batch_sampling: str = "fixed-size",
    num_records: int = 1,
    num_rounds: int = 1,
) -> Case:
    """Return the case of DP-PASGD; with one local step it is DP-SGD."""
    shared: dict[str, Any] = {
        "batch_size": 1,
        "clip_norm": clip_norm,
        "epsilon": epsilon,
        "delta": delta,
        "num_steps": num_rounds * num_local_steps,
        "num_local_steps": num_local_steps,
        "learning_rate": 0.5,
        "batch_sampling": batch_sampling,
    }
    return local(
        label,
        DPPASGDRecipe.method,
        lambda: DPPASGDRecipe(**shared, loss=worst_case.loss),
        lambda: DPPASGD(**shared, num_clients=1, num_records=num_records),
        num_rounds=num_rounds,
        num_records=num_records,
    )


def nbafl(
    label: str,
    *,
    epsilon: float | None = _EPSILON,
    paper_epsilon: float | None = None,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    num_rounds: int = 1,
) -> Case:
    """Return the case of NbAFL: the unit is the client. With the paper's epsilon, what is audited is the proved one."""
    shared: dict[str, Any] = {"clip_norm": clip_norm, "epsilon": epsilon, "paper_epsilon": paper_epsilon, "delta": delta}
    shared |= {"num_replies": num_rounds, "uplink_exposures": None if paper_epsilon is None else num_rounds}
    return local(
        label,
        NbAFLRecipe.method,
        lambda: NbAFLRecipe(**shared, training=TRAINING, min_records=1),
        lambda: NbAFL(**shared, num_clients=1, num_records=1),
        num_rounds=num_rounds,
    )
