"""How each method becomes a case: its strategy, its clients, and the neighbouring inputs that its relation allows.

A case has few rounds and few clients, so that its claim is as tight as it can be, and noise so small that error rates can be seen
in some thousand trials: it costs an audit nothing to claim a large epsilon, and noise, sensitivity and accounting are the same
for a small one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from flower_dp.audit import worst_case
from flower_dp.audit.case import Case
from flower_dp.clients import BLUR, LUS, DPClient, LocalDPClient, Training
from flower_dp.clients.node_client import NodeClient
from flower_dp.core import checks
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.methods import METHODS
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.events import Relation
from flower_dp.strategies import AdaptiveClip, DPFedAvg, DPStrategy

DELTA = 1e-3
_EPSILON = 8.0
CLIP_NORM = 1.0
# With shares of noise / n in the place of noise / sqrt(n), a participant among n clients meets noise that is sqrt(n) times too
# small with the unit, and sqrt(n / 2) times without it: among two that is none at all without it, for the server adds its share.
_SHARING = 4
TRAINING = Training(learning_rate=1.0, batch_size=1, loss=worst_case.loss)
BLURS = replace(TRAINING, regularizers=(BLUR(strength=0.1, bound=0.01),), sparsifier=LUS(keep_ratio=0.5))
# Settings that a strategy with one noised sum takes under the same name, if they are not empty.
_PASSED = ("keep_ratio", "quantization_levels", "mask", "random_ratio", "placement", "relation")


def case_of(name: str, config: Mapping[str, Any]) -> Case:
    """Return the case of a run-config.

    Everything that decides about noise, clip and sampling is the run's; what decides only how often and among how many is not:
    two clients, or four that share the noise, and one round, for which the strategy makes a statement of its own. With fixed-size
    sampling half of them are drawn. Budgets of clients are for that one round.

    Args:
        name: of the run.
        config: every setting of the app.

    Raises:
        ValueError: for an unknown method, or if the run has no privacy.
    """
    method, label = checks.one_of("method", str(config["method"]), tuple(METHODS)), f"{name}, one round"
    own = {key.removeprefix(f"{method}."): value for key, value in config.items() if key.startswith(f"{method}.")}
    common = {key: value for key, value in config.items() if "." not in key}
    words = {key.replace("-", "_"): value for key, value in (common | own).items()}
    if not math.isfinite(words["epsilon"] or words.get("paper_epsilon", 0.0)):
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    case: Case = METHODS[method].load("audit")(label, **words)
    return case


def noised_sum(
    label: str,
    *,
    method: str,
    clip_norm: float = CLIP_NORM,
    noise_multiplier: float = 0.4,
    epsilon: float = 0.0,
    delta: float = DELTA,
    sampling: str = "full",
    rounds: int = 1,
    stock: bool = False,
    top_k: bool = False,
    lossy: bool = False,
    **words: Any,
) -> Case:
    """Return the case of the settings of a method with one noised sum.

    Args:
        label: of the case.
        method: its name.
        clip_norm: the setting; the first one if it is adaptive.
        noise_multiplier: the setting, unless there is an epsilon.
        epsilon: the setting, for all rounds of the settings; 0 for none.
        delta: the setting; 0 for the default of as many clients as there are.
        sampling: the setting.
        rounds: of a run.
        stock: whether the clients are stock ones.
        top_k: whether the largest coordinates are left of the noised sum or shares.
        lossy: whether something else is left out after the noise.
        words: all other settings.

    Raises:
        ValueError: if there is no noise.
    """
    make, passed = METHODS[method].load("strategy"), {key: words[key] for key in _PASSED if words.get(key)}
    if passed.get("placement") == "distributed":
        passed |= {"trusted_server": words.get("trusted_server", True)}
    delta = delta or words["num_clients"] ** -1.1
    if epsilon:
        run: Any = make(  # the noise of the whole run
            clip_norm=clip_norm,
            epsilon=epsilon,
            num_rounds=words["num_rounds"],
            sampling=_sampler(sampling, words),
            num_clients=words["num_clients"],
            delta=delta,
            **passed,
        )
        noise_multiplier = run.rules.release.mechanism.noise_multiplier
    if not noise_multiplier:
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    training = BLURS if words.get("blur_strength") or words.get("update_keep_ratio", 1.0) < 1 else TRAINING
    num_clients = clients_of(central=_is_central(make, passed), lossy=lossy or top_k)
    sampled = _sampler(sampling, {**words, "cohort_size": num_clients // 2})
    clips = AdaptiveClip(initial=clip_norm, smallest=clip_norm / 1000, largest=clip_norm * 1000)
    return client_level(
        label,
        make,
        noise_multiplier=noise_multiplier,
        clip_norm=clips if words.get("clip_quantile") else clip_norm,
        delta=delta,
        sampling=FullSampling() if isinstance(sampled, RoundRobinSampling) else sampled,
        num_rounds=rounds,
        training=None if stock else replace(training, sam_radius=words.get("sam_radius", 0.0)),
        inputs=0.0 if top_k or training.sparsifier else 1.0,
        post_processed=lossy or top_k,
        **passed,
    )


def dp_fedsam(label: str, **words: Any) -> Case:
    """Return the case of DP-FedSAM's settings, whose noised sum or shares may be compressed."""
    top_k, lossy = words.get("keep_ratio", 1.0) < 1, bool(words.get("quantization_levels"))
    return noised_sum(label, top_k=top_k, lossy=lossy, **words)


def _sampler(kind: str, words: Mapping[str, Any]) -> Sampler:
    if kind == "full":
        return FullSampling()
    if kind in ("", "poisson"):
        return PoissonSampling(sampling_rate=words["sampling_rate"])
    return (FixedSizeSampling if kind == "fixed-size" else RoundRobinSampling)(cohort_size=words["cohort_size"])


def _is_central(make: Callable[..., DPStrategy], own: Mapping[str, Any]) -> bool:
    return bool(own.get("placement", "central" if make is DPFedAvg else "distributed") == "central")


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
    replaced = own.get("relation") == "replace-one" or (not own.get("relation") and isinstance(sampling, FixedSizeSampling))
    central = _is_central(make, own)
    full = isinstance(sampling, FullSampling)
    shows = not central and (not own.get("trusted_server", True) or post_processed)
    without = -1.0 if replaced else 0.0
    num_clients = clients_of(central=central, lossy=post_processed)
    if not central and not own.get("trusted_server", True):
        own = {"min_reply_ratio": 1.0, **own}
    others = (-1.0, *(num_clients - 2) * (0.0,)) if full else (num_clients - 1) * (without,)

    def strategy() -> DPStrategy:
        return make(
            clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, num_clients=num_clients, delta=delta, **own
        )

    def client(**node: Any) -> DPClient:
        assert training is not None  # noqa: S101 (else clients are stock ones)
        return DPClient(**node, training=training, device="cpu")

    return Case(
        label=label,
        method=strategy().rules.releases[0].name,
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


def local(
    label: str,
    method: str,
    recipe: Mapping[str, Any],
    strategy: Mapping[str, Any],
    *,
    rounds: int = 1,
    num_records: int = 1,
    without: float = -1.0,
    inputs: float = 1.0,
    post_processed: bool = False,
) -> Case:
    """Return the case of a method whose messages are private one by one: one client, whose messages the server sees.

    Args:
        label: of the case.
        method: the method's name.
        recipe: arguments of the client's recipe, which is made once, when the first client is: it may calibrate its noise.
        strategy: arguments of the strategy.
        rounds: of a run.
        num_records: of the client.
        without: what the unit pushes in the neighbouring input: -1 where it is replaced, 0 where it is left out.
        inputs: which parameters are pushed.
        post_processed: see `Case`.
    """
    made = cache(lambda: METHODS[method].load("recipe")(**recipe))

    def client(**node: Any) -> NodeClient:
        return LocalDPClient(**node, recipe=made(), device="cpu")

    return Case(
        label=label,
        method=method,
        strategy=lambda: METHODS[method].load("strategy")(**strategy, num_clients=1),
        client=client,
        present=(1.0,),
        absent=(without,),
        view="server",
        num_rounds=rounds,
        num_records=num_records,
        inputs=inputs,
        post_processed=post_processed,
    )


def fedsgd_dpc(
    label: str,
    *,
    method: str = "fedsgd-dpc",
    mechanism: str,
    epsilon: float = _EPSILON,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    record_sampling_rate: float = 1.0,
    relation: Relation = "replace-one",
    rounds: int = 1,
    **_: Any,
) -> Case:
    """Return the case of FedSGD-DPC's settings: one client with one record."""
    shared: dict[str, Any] = {
        "mechanism": mechanism,
        "clip_norm": clip_norm,
        "epsilon": epsilon,
        "delta": 0.0 if mechanism == "laplace" else delta,
        "num_records": 1,
        "num_replies": rounds,
        "sampling_rate": record_sampling_rate,
        "relation": relation,
    }
    return local(
        label,
        method,
        {**shared, "loss": worst_case.loss},
        {**shared, "cohort_size": 1, "learning_rate": 1.0},
        rounds=rounds,
        without=-1.0 if relation == "replace-one" else 0.0,
        inputs=0.0 if mechanism == "laplace" else 1.0,  # in L1 the worst change is that of one coordinate
    )


def local_steps(
    label: str,
    *,
    method: str = "dp-fedpaq",
    epsilon: float = _EPSILON,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    quantization_levels: int = 0,
    sensitivity: str = "clip-update",
    rounds: int = 1,
    **_: Any,
) -> Case:
    """Return the case of the settings of DP-FedPAQ or SCAFFOLD.

    With an update clip it is one that a single record can reach, in two local steps. The other proofs of the sensitivity have
    the clip of records alone: in one step a record reaches what they prove.
    """
    rate, clipped, convex = 0.5, sensitivity == "clip-update", sensitivity == "convex-glm"
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
    shared = {"steps": steps, "epsilon": epsilon, "delta": delta, "num_replies": rounds}
    shared |= {"quantization_levels": quantization_levels or None}
    return local(
        label,
        method,
        {**shared, "loss": nn.functional.mse_loss if convex else worst_case.loss},
        {**shared, "sampling": FullSampling(), "num_records": steps.num_records},
        rounds=rounds,
        num_records=steps.num_records,
        post_processed=bool(quantization_levels),
    )


def dp_pasgd(
    label: str,
    *,
    method: str = "dp-pasgd",
    num_local_steps: int,
    epsilon: float = _EPSILON,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    batch_sampling: str = "fixed-size",
    rounds: int = 1,
    **_: Any,
) -> Case:
    """Return the case of DP-PASGD's settings; with one local step it is DP-SGD."""
    num_records = 2 if batch_sampling == "poisson" else 1
    shared: dict[str, Any] = {
        "batch_size": 1,
        "clip_norm": clip_norm,
        "epsilon": epsilon,
        "delta": delta,
        "num_steps": rounds * num_local_steps,
        "num_local_steps": num_local_steps,
        "learning_rate": 0.5,
        "batch_sampling": batch_sampling,
    }
    recipe, strategy = {**shared, "loss": worst_case.loss}, {**shared, "num_records": num_records}
    return local(label, method, recipe, strategy, rounds=rounds, num_records=num_records)


def nbafl(
    label: str,
    *,
    method: str = "nbafl",
    epsilon: float = _EPSILON,
    paper_epsilon: float = 0.0,
    clip_norm: float = CLIP_NORM,
    delta: float = DELTA,
    rounds: int = 1,
    **_: Any,
) -> Case:
    """Return the case of NbAFL's settings: the unit is the client. With the paper's epsilon, the proved one is audited."""
    paper = None if epsilon else paper_epsilon
    shared: dict[str, Any] = {"clip_norm": clip_norm, "epsilon": epsilon or None, "paper_epsilon": paper, "delta": delta}
    shared |= {"num_replies": rounds, "uplink_exposures": None if paper is None else rounds}
    return local(label, method, {**shared, "training": TRAINING, "min_records": 1}, {**shared, "num_records": 1}, rounds=rounds)


def _all() -> dict[str, Case]:
    cases = {label: (method, words) for method in METHODS.values() for label, words in method.cases.items()}
    return {label: method.load("audit")(label, method=method.name, **words) for label, (method, words) in cases.items()}


# The cases of every method.
CASES: dict[str, Case] = _all()
