"""The cases of all methods: strategy, clients, and the neighboring inputs that the relation allows.

A case has few rounds and few clients, so that its claim is as close to the true epsilon as it can be. Its noise is so small
that some thousand trials measure error rates. A large epsilon costs an audit nothing: noise, sensitivity and accounting are the
same for a small one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from flower_dp import clients
from flower_dp.audit import worst_case
from flower_dp.audit.case import Case
from flower_dp.clients.node_client import HostingClient
from flower_dp.core import checks
from flower_dp.core.participation import MinimumSeparationSampling, default_separation
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.methods import METHODS
from flower_dp.planning.correlated_noise import noise_named
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import AdaptiveClip, DPStrategy

CLIP_NORM = 1.0
# Default settings of a case.
_DEFAULTS: Mapping[str, Any] = {"clip_norm": CLIP_NORM, "epsilon": 8.0, "delta": 1e-3, "rounds": 1}
# If shares were noise / n, not noise / sqrt(n), a participant among n clients would meet noise that is too small by a factor of
# sqrt(n) with the unit, and of sqrt(n / 2) without it. With two clients the second factor is 1: the server adds the unit's share.
_SHARING = 4
TRAINING = clients.Training(learning_rate=1.0, batch_size=1, loss=worst_case.loss)
BLURS = replace(TRAINING, regularizers=(clients.BLUR(strength=0.1, bound=0.01),), sparsifier=clients.LUS(keep_ratio=0.5))
# Settings that a strategy with one noised sum takes under the same name, unless they are empty.
_PASSED = ("keep_ratio", "quantization_levels", "mask", "random_ratio", "placement", "relation")


def case_of(name: str, config: Mapping[str, Any]) -> Case:
    """Return the case of a run-config.

    Everything that decides noise, clip and sampling is the run's. The numbers of clients and rounds are the case's: two clients,
    or four that share the noise, and one round, for which the strategy makes its own statement. Fixed-size sampling selects half
    of the clients. Budgets of clients are for that one round.

    Args:
        name: name of the run.
        config: every setting of the app, by flat key.

    Raises:
        ValueError: for an unknown method, or if the run has no privacy.
    """
    method, label = checks.one_of("method", str(config["method"]), tuple(METHODS)), f"{name}, one round"
    of_method = {key.removeprefix(f"{method}."): value for key, value in config.items() if key.startswith(f"{method}.")}
    common = {key: value for key, value in config.items() if "." not in key}
    words = {key.replace("-", "_"): value for key, value in (common | of_method).items()}
    if not math.isfinite(words["epsilon"] or words.get("paper_epsilon", 0.0)):
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    case: Case = METHODS[method].load("audit")(label, **words)
    return case


def noised_sum(
    label: str, *, method: str | Callable[..., DPStrategy], top_k: bool = False, lossy: bool = False, **words: Any
) -> Case:
    """Return the case of a method with one noised sum: two clients, one of which is the unit; four if clients share the noise.

    Under add-or-remove-one, the unit does not reply in the neighboring input. If adversaries may know who replies, it replies
    with an update of zero, as the statement says. Under replace-one its update points in the opposite direction. A second
    client's update, against the unit's, is the same in both inputs; those of further clients are zero. With sampling there is one
    round, and all other clients send the unit's update of the neighboring input: then a cohort without the unit looks like that
    input.

    If clients send the largest coordinates or the levels of their own noised updates, there are always two clients: each is
    protected by its own share alone, and the noise of others would hide that. If the server does not complete the noise, all
    clients must reply, so that there are no more shares than the charges assume.

    Args:
        label: label of the case.
        method: name of the method, or a strategy that is not a method of this package.
        top_k: whether only the largest coordinates of the noised sum or shares are kept.
        lossy: whether something else is dropped after the noise.
        words: all settings. `clip_norm`: the initial one if the clip is adaptive. `noise_multiplier`: ignored if there is an
            `epsilon`, which is for all rounds of the settings. `delta`: if 0, the default for `num_clients`. `rounds`: rounds of
            a run of the case. `stock`: whether clients are stock clients.

    Raises:
        ValueError: if there is no noise.
    """
    words = {**_DEFAULTS, "epsilon": 0.0, "noise_multiplier": 0.4, "sampling": "full", **words}
    make: Callable[..., DPStrategy] = METHODS[method].load("strategy") if isinstance(method, str) else method
    passed = {key: words[key] for key in _PASSED if words.get(key)}
    common = {"delta": words["delta"] or words["num_clients"] ** -1.1, **passed}
    # A user's strategy may have another default placement than DP-FedAvg, or no such argument, so read it from an instance.
    probe: Any = make(clip_norm=CLIP_NORM, noise_multiplier=1.0, sampling=FullSampling(), num_clients=2, **common)
    central = probe.rules.noise.placement == "central"
    trusted, post_processed = central or words.get("server_completes_noise", True), top_k or lossy
    if not central:
        common |= {"server_completes_noise": trusted} if trusted else {"server_completes_noise": False, "min_reply_ratio": 1.0}
    clip_norm, noise_multiplier = words["clip_norm"], words["noise_multiplier"]
    if words["epsilon"]:  # the noise of the whole run
        of_run = {name: words[name] for name in ("clip_norm", "epsilon", "num_rounds", "num_clients")}
        run: Any = make(**of_run, sampling=_sampler(words), **common)
        noise_multiplier = run.rules.release.mechanism.noise_multiplier
    if not noise_multiplier:
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    num_clients = 2 if central or post_processed else _SHARING
    sampling = _sampler({**words, "cohort_size": num_clients // 2})
    if isinstance(sampling, RoundRobinSampling | MinimumSeparationSampling):
        sampling = FullSampling()
    clip = AdaptiveClip(initial_clip_norm=clip_norm, min_clip_norm=clip_norm / 1000, max_clip_norm=clip_norm * 1000)
    common |= {"clip_norm": clip if words.get("clip_quantile") else clip_norm, "noise_multiplier": noise_multiplier}
    training = BLURS if words.get("blur_strength") or words.get("lus_keep_ratio", 1.0) < 1 else TRAINING
    full = isinstance(sampling, FullSampling)
    replaced = passed.get("relation") == "replace-one" or (not passed.get("relation") and isinstance(sampling, FixedSizeSampling))
    without = -1.0 if replaced else 0.0
    others = (-1.0, *(num_clients - 2) * (0.0,)) if full else (num_clients - 1) * (without,)

    def strategy() -> DPStrategy:
        return make(sampling=sampling, num_clients=num_clients, **common)

    def client(**node: Any) -> clients.DPClient:
        return clients.DPClient(**node, training=replace(training, sam_radius=words.get("sam_radius", 0.0)), device="cpu")

    return Case(
        label=label,
        method=strategy().rules.releases[0].name,
        strategy=strategy,
        client=None if words.get("stock") else client,
        present=(1.0, *others),
        absent=(without, *others),
        drops_out=not replaced and (central or (trusted and not post_processed)),
        view="outsider" if central else "participant",
        num_rounds=words["rounds"] if full else 1,
        inputs=0.0 if top_k or training.sparsifier else 1.0,
        post_processed=post_processed,
    )


def correlated(label: str, *, method: str = "dp-ftrl", rounds: int = 4, **words: Any) -> Case:
    """Return the case of DP-FTRL's settings: two clients, who take part in every second round, the first one included.

    That is the worst pattern of a separation of two rounds. The noise multiplier of the whole run is that of the settings, or the
    given one if they have no cohort size.
    """
    words = {**_DEFAULTS, "epsilon": 0.0, "noise_multiplier": 0.4, "noise": "blt", "num_buffers": 0, "bands": 0, **words}
    relation = words.get("relation") or "add-or-remove-one"
    common = {"clip_norm": words["clip_norm"], "delta": words["delta"] or words["num_clients"] ** -1.1, "relation": relation}
    make: Callable[..., DPStrategy] = METHODS[method].load("strategy")

    def made(num_rounds: int, num_clients: int, sampling: Any, bands: int, **noise: float) -> Any:
        kind = noise_named(words["noise"], num_buffers=words["num_buffers"], bands=bands)
        return make(num_rounds=num_rounds, num_clients=num_clients, sampling=sampling, noise=kind, **common, **noise)

    if not (words["epsilon"] or words["noise_multiplier"]):
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    multiplier = words["noise_multiplier"]
    if words.get("cohort_size"):
        chosen = "epsilon" if words["epsilon"] else "noise_multiplier"
        of_run = made(words["num_rounds"], words["num_clients"], _separated(words), words["bands"], **{chosen: words[chosen]})
        label, multiplier = f"{label.removesuffix(', one round')}, {rounds} rounds", of_run.rules.noise.promised_multiplier
    case = (rounds, 2, MinimumSeparationSampling(cohort_size=2, min_separation=2), min(words["bands"], 2))
    multiplier *= made(*case, noise_multiplier=1.0).rules.noise.run_sensitivity

    def client(**node: Any) -> clients.DPClient:
        return clients.DPClient(**node, training=TRAINING, device="cpu")

    return Case(
        label=label,
        method=method,
        strategy=lambda: made(*case, noise_multiplier=multiplier),
        client=None if words.get("stock") else client,
        present=(1.0, -1.0),
        absent=(-1.0 if relation == "replace-one" else 0.0, -1.0),
        num_rounds=rounds,
        separated=True,
    )


def dp_fedsam(label: str, **words: Any) -> Case:
    """Return the case of DP-FedSAM's settings; the noised sum or shares may be compressed."""
    top_k, lossy = words.get("keep_ratio", 1.0) < 1, bool(words.get("quantization_levels"))
    return noised_sum(label, top_k=top_k, lossy=lossy, **words)


def _sampler(words: Mapping[str, Any]) -> Sampler:
    kind = words["sampling"]
    if kind == "full":
        return FullSampling()
    if kind in ("", "poisson"):
        return PoissonSampling(sampling_rate=words["sampling_rate"])
    if kind == "minimum-separation":
        return _separated(words)
    return (FixedSizeSampling if kind == "fixed-size" else RoundRobinSampling)(cohort_size=words["cohort_size"])


def _separated(words: Mapping[str, Any]) -> MinimumSeparationSampling:
    size, most = words["cohort_size"], words["max_participations"] or None
    separation = words["min_separation"] or default_separation(words["num_clients"], size)
    return MinimumSeparationSampling(cohort_size=size, min_separation=separation, max_participations=most)


def _local(
    label: str, method: str, recipe: Mapping[str, Any], strategy: Mapping[str, Any], *, without: float = -1.0, **words: Any
) -> Case:
    """Return the case of a method with local DP: one client, whose messages the server sees.

    Args:
        label: label of the case.
        method: name of the method.
        recipe: arguments of the client's recipe. It is made once, with the first client, since it may calibrate its noise.
        strategy: arguments of the strategy.
        without: push of the unit in the neighboring input: -1 if the unit is replaced, 0 if it is left out.
        words: arguments of `Case`.
    """
    made = cache(lambda: METHODS[method].load("recipe")(**recipe))

    def client(**node: Any) -> HostingClient:
        return clients.LocalDPClient(**node, recipe=made(), device="cpu")

    def server() -> DPStrategy:
        instance: DPStrategy = METHODS[method].load("strategy")(**strategy, num_clients=1)
        return instance

    inputs = {"present": (1.0,), "absent": (without,), "view": "server"}
    return Case(label=label, method=method, strategy=server, client=client, **inputs, **words)  # type: ignore[arg-type]


def fedsgd_dpc(label: str, *, method: str = "fedsgd-dpc", **words: Any) -> Case:
    """Return the case of FedSGD-DPC's settings: one client with one record."""
    words = {**_DEFAULTS, "record_sampling_rate": 1.0, "relation": "replace-one", **words}
    laplace = words["mechanism"] == "laplace"
    shared = _some(words, "mechanism", "clip_norm", "epsilon", "relation")
    shared |= {"delta": 0.0 if laplace else words["delta"], "sampling_rate": words["record_sampling_rate"]}
    shared |= {"num_records": 1, "num_replies": words["rounds"]}
    recipe, strategy = {**shared, "loss": worst_case.loss}, {**shared, "cohort_size": 1, "learning_rate": 1.0}
    without = -1.0 if words["relation"] == "replace-one" else 0.0
    # In L1 norm the worst change is on one coordinate.
    return _local(label, method, recipe, strategy, num_rounds=words["rounds"], without=without, inputs=0.0 if laplace else 1.0)


def local_steps(label: str, *, method: str = "dp-fedpaq", **words: Any) -> Case:
    """Return the case of the settings of DP-FedPAQ or SCAFFOLD.

    A single record can reach the update clip, if there is one, in two local steps. The other proofs of the sensitivity rest on
    the clip of records alone: a record reaches their bound in one step.
    """
    words = {**_DEFAULTS, "sensitivity": "clip-update", "quantization_levels": 0, **words}
    rate, clip_norm, sensitivity = 0.5, words["clip_norm"], words["sensitivity"]
    clipped, convex, rounds = sensitivity == "clip-update", sensitivity == "convex-glm", words["rounds"]
    steps = FedPAQSteps(
        learning_rate=rate,
        num_local_steps=2 if clipped else 1,
        # With one record, the bound on the whole sum under convex-glm would hide a missing clip.
        batch_size=8 if convex else 1,
        clip_norm=clip_norm,
        sensitivity=sensitivity,
        update_clip_norm=rate * clip_norm if clipped else None,
        smoothness=2 / rate if convex else None,  # smoothness of the squared error for features up to 1, with a bias
        decay_iterations=None,
    )
    levels, size = words["quantization_levels"], steps.num_records
    shared = _some(words, "epsilon", "delta") | {"steps": steps, "num_replies": rounds, "quantization_levels": levels or None}
    recipe = {**shared, "loss": nn.functional.mse_loss if convex else worst_case.loss}
    strategy = {**shared, "sampling": FullSampling(), "num_records": size}
    return _local(label, method, recipe, strategy, num_rounds=rounds, num_records=size, post_processed=bool(levels))


def dp_pasgd(label: str, *, method: str = "dp-pasgd", **words: Any) -> Case:
    """Return the case of DP-PASGD's settings, which is DP-SGD if there is one local step."""
    words = {**_DEFAULTS, "batch_sampling": "fixed-size", **words}
    num_records = 2 if words["batch_sampling"] == "poisson" else 1
    shared = _some(words, "clip_norm", "epsilon", "delta", "num_local_steps", "batch_sampling")
    shared |= {"batch_size": 1, "num_steps": words["rounds"] * words["num_local_steps"], "learning_rate": 0.5}
    recipe, strategy = {**shared, "loss": worst_case.loss}, {**shared, "num_records": num_records}
    return _local(label, method, recipe, strategy, num_rounds=words["rounds"], num_records=num_records)


def nbafl(label: str, *, method: str = "nbafl", **words: Any) -> Case:
    """Return the case of NbAFL's settings, with the client as unit. With the paper's epsilon, audit the proved one."""
    words = {**_DEFAULTS, "paper_epsilon": 0.0, **words}
    rounds, paper = words["rounds"], None if words["epsilon"] else words["paper_epsilon"]
    shared = _some(words, "clip_norm", "delta") | {"epsilon": words["epsilon"] or None, "paper_epsilon": paper}
    shared |= {"num_replies": rounds, "uplink_exposures": None if paper is None else rounds}
    recipe, strategy = {**shared, "training": TRAINING, "min_records": 1}, {**shared, "num_records": 1}
    return _local(label, method, recipe, strategy, num_rounds=rounds)


def _some(words: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: words[name] for name in names}


def _all() -> dict[str, Case]:
    cases = {label: (method, words) for method in METHODS.values() for label, words in method.cases.items()}
    return {label: method.load("audit")(label, method=method.name, **words) for label, (method, words) in cases.items()}


# The cases of every method.
CASES: dict[str, Case] = _all()
