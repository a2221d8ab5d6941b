"""The cases of every method, with settings for which its claim is as tight as it can be: few rounds, few clients.

Noise is so small that error rates can be seen in some thousand trials: it costs an audit nothing to claim a large epsilon, and
noise, sensitivity and accounting are the same for a small one.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, Sampler
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.events import Relation
from flower_dp.strategies import (
    DPPASGD,
    AdaptiveClip,
    DPFedAvg,
    DPFedPAQ,
    DPFedSAM,
    DPStrategy,
    FedSGDDPC,
    FedSMP,
    NbAFL,
    Scaffold,
)

DELTA = 1e-3
# What is post-processed is audited by the bound for every mechanism. It sees nothing of events whose probability is far
# below 1 / trials: epsilon is claimed at a delta that can be seen.
_LARGE_DELTA = 0.05
_EPSILON = 8.0
_CLIP_NORM = 1.0
_TRAINING = Training(learning_rate=1.0, batch_size=1, loss=worst_case.loss)
_SAM = replace(_TRAINING, sam_radius=0.05)
_BLURS = replace(_TRAINING, regularizers=(BLUR(strength=0.1, bound=0.01),), sparsifier=LUS(keep_ratio=0.5))


def client_level(
    label: str,
    make: Callable[..., DPStrategy],
    *,
    noise_multiplier: float,
    clip_norm: float | AdaptiveClip = _CLIP_NORM,
    delta: float = DELTA,
    sampling: Sampler | None = None,
    num_rounds: int = 1,
    training: Training | None = _TRAINING,
    inputs: float = 1.0,
    post_processed: bool = False,
    **own: Any,
) -> Case:
    """Return the case of a method with one noised sum: two clients, one of which is the unit.

    Under add-or-remove-one the unit does not answer in the neighbouring input; where who answers may be known, it answers with an
    update of zero, as the statement says. Under replace-one its update points into the opposite direction. A second client's
    update, against the unit's, is the same in both. With sampling there is one round, and the second client's update is that of
    the neighbouring input: then a cohort without the unit can't be told from it.

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
    without, other = (-1.0 if replaced else 0.0), -1.0

    def strategy() -> DPStrategy:
        return make(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, num_clients=2, delta=delta, **own)

    def client(**node: Any) -> DPClient:
        assert training is not None  # noqa: S101 (else clients are stock ones)
        return DPClient(**node, training=training, device="cpu")

    return Case(
        label=label,
        method=strategy().rules.training.name,
        strategy=strategy,
        client=None if training is None else client,
        present=(1.0, other if full else without),
        absent=(without, other if full else without),
        silent=not replaced and not shows,
        view="outsider" if central else "participant",
        num_rounds=num_rounds if full else 1,
        inputs=inputs,
        post_processed=post_processed,
    )


def training_of(*, blurs: bool) -> Training:
    """Return the recipe of the clients: plain SGD, or with BLUR and LUS."""
    return _BLURS if blurs else _TRAINING


def sampling_relation(sampling: Sampler) -> Relation:
    """Return the relation that a strategy takes by default."""
    return "replace-one" if isinstance(sampling, FixedSizeSampling) else "add-or-remove-one"


def local(
    label: str,
    recipe: LocalRecipe,
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
        recipe: of the client.
        strategy: makes the strategy.
        num_rounds: of a run.
        num_records: of the client.
        without: what the unit pushes in the neighbouring input: -1 where it is replaced, 0 where it is left out.
        inputs: which parameters are pushed.
        post_processed: see `Case`.
    """

    def client(**node: Any) -> NodeClient:
        return LocalDPClient(**node, recipe=recipe, device="cpu")

    return Case(
        label=label,
        method=recipe.method,
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
    clip_norm: float = _CLIP_NORM,
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
        FedSGDDPCRecipe(**shared, loss=worst_case.loss),
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
    clip_norm: float = _CLIP_NORM,
    delta: float = DELTA,
    quantization_levels: int | None = None,
    num_rounds: int = 1,
) -> Case:
    """Return the case of DP-FedPAQ or SCAFFOLD: two local steps, with an update clip that one record alone can reach."""
    rate = 0.5
    steps = FedPAQSteps(
        learning_rate=rate,
        num_local_steps=2,
        batch_size=1,
        clip_norm=clip_norm,
        update_clip_norm=rate * clip_norm,
        decay_iterations=None,
    )
    shared: dict[str, Any] = {"steps": steps, "epsilon": epsilon, "delta": delta, "quantization_levels": quantization_levels}
    recipe, make = (ScaffoldRecipe, Scaffold) if scaffold else (DPFedPAQRecipe, DPFedPAQ)
    return local(
        label,
        recipe(**shared, num_replies=num_rounds, loss=worst_case.loss),
        lambda: make(**shared, sampling=FullSampling(), num_clients=1, num_records=2, num_replies=num_rounds),
        num_rounds=num_rounds,
        num_records=2,
        post_processed=quantization_levels is not None,
    )


def dp_pasgd(
    label: str,
    *,
    num_local_steps: int,
    epsilon: float = _EPSILON,
    clip_norm: float = _CLIP_NORM,
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
        DPPASGDRecipe(**shared, loss=worst_case.loss),
        lambda: DPPASGD(**shared, num_clients=1, num_records=num_records),
        num_rounds=num_rounds,
        num_records=num_records,
    )


def nbafl(
    label: str,
    *,
    epsilon: float | None = _EPSILON,
    paper_epsilon: float | None = None,
    clip_norm: float = _CLIP_NORM,
    delta: float = DELTA,
    num_rounds: int = 1,
) -> Case:
    """Return the case of NbAFL: the unit is the client. With the paper's epsilon, what is audited is the proved one."""
    shared: dict[str, Any] = {"clip_norm": clip_norm, "epsilon": epsilon, "paper_epsilon": paper_epsilon, "delta": delta}
    shared |= {"num_replies": num_rounds, "uplink_exposures": None if paper_epsilon is None else num_rounds}
    return local(
        label,
        NbAFLRecipe(**shared, training=_TRAINING, min_records=1),
        lambda: NbAFL(**shared, num_clients=1, num_records=1),
        num_rounds=num_rounds,
    )


def _all() -> dict[str, Case]:
    # A Gaussian trade-off curve of mu = 2.5: against a participant, who knows half of the variance, or against everybody.
    distributed: dict[str, Any] = {"placement": "distributed", "noise_multiplier": 0.4 * math.sqrt(2)}
    central: dict[str, Any] = {"placement": "central", "noise_multiplier": 0.4}
    # More runs are needed to see what sampling hides, and those of stock clients are quick.
    amplified: dict[str, Any] = {"noise_multiplier": 0.4, "training": None}
    adaptive = AdaptiveClip(initial=_CLIP_NORM, smallest=_CLIP_NORM, largest=_CLIP_NORM)
    cases = [
        client_level("dp-fedavg", DPFedAvg, **central),
        client_level("dp-fedavg, two rounds", DPFedAvg, **central | {"noise_multiplier": 0.4 * math.sqrt(2)}, num_rounds=2),
        client_level("dp-fedavg, stock clients", DPFedAvg, **central, training=None),
        client_level("dp-fedavg, replace-one", DPFedAvg, **central | {"noise_multiplier": 0.8}, relation="replace-one"),
        client_level("dp-fedavg, Poisson", DPFedAvg, **amplified, sampling=PoissonSampling(sampling_rate=0.5)),
        client_level(
            "dp-fedavg, fixed size", DPFedAvg, **amplified | {"noise_multiplier": 0.8}, sampling=FixedSizeSampling(cohort_size=1)
        ),
        client_level("dp-fedavg, distributed", DPFedAvg, **distributed),
        client_level(
            "dp-fedavg, distributed, replace-one",
            DPFedAvg,
            **distributed | {"noise_multiplier": 0.8 * math.sqrt(2)},
            relation="replace-one",
        ),
        client_level("dp-fedavg, untrusted server", DPFedAvg, **distributed, trusted_server=False),
        client_level("dp-fedavg, adaptive clip", DPFedAvg, **central | {"clip_norm": adaptive}),
        client_level("dp-fedavg, BLUR and LUS", DPFedAvg, **central, training=_BLURS, inputs=0.0),
        client_level("dp-fedsam", DPFedSAM, **distributed, training=_SAM),
        client_level("dp-fedsam, central", DPFedSAM, **central, training=_SAM),
        client_level(
            "dp-fedsam, central top-k",
            DPFedSAM,
            placement="central",
            noise_multiplier=0.6,
            delta=_LARGE_DELTA,
            keep_ratio=0.5,
            inputs=0.0,
            post_processed=True,
        ),
        client_level(
            "dp-fedsam, top-k of own updates",
            DPFedSAM,
            noise_multiplier=0.85,
            delta=_LARGE_DELTA,
            keep_ratio=0.5,
            inputs=0.0,
            post_processed=True,
        ),
        client_level(
            "dp-fedsam, quantised",
            DPFedSAM,
            noise_multiplier=0.85,
            delta=_LARGE_DELTA,
            quantization_levels=10,
            post_processed=True,
        ),
        client_level("fed-smp, rand-k", FedSMP, **distributed, keep_ratio=0.5),
        client_level(
            "fed-smp, top-k, two rounds",
            FedSMP,
            placement="distributed",
            noise_multiplier=0.8,
            num_rounds=2,
            keep_ratio=0.5,
            mask="top-k",
        ),
        fedsgd_dpc("fedsgd-dpc, Laplace", mechanism="laplace", epsilon=5.0),
        fedsgd_dpc("fedsgd-dpc, Gaussian", mechanism="gaussian"),
        fedsgd_dpc("fedsgd-dpc, Gaussian, add-or-remove-one", mechanism="gaussian", relation="add-or-remove-one"),
        fedsgd_dpc(
            "fedsgd-dpc, Gaussian, sampled records",
            mechanism="gaussian",
            sampling_rate=0.5,
        ),
        nbafl("nbafl"),
        local_steps("dp-fedpaq"),
        local_steps("dp-fedpaq, quantised", quantization_levels=10, epsilon=2.5, delta=_LARGE_DELTA),
        local_steps("scaffold, two rounds", scaffold=True, num_rounds=2),
        dp_pasgd("dp-pasgd", num_local_steps=3),
        dp_pasgd(
            "dp-pasgd, Poisson",
            num_local_steps=1,
            batch_sampling="poisson",
            num_records=2,
        ),
        dp_pasgd("dp-sgd", num_local_steps=1),
    ]
    return {case.label: case for case in cases}


CASES: dict[str, Case] = _all()
