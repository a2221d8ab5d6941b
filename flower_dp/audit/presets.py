"""The case of a run's settings: its own noise, clip, placement and sampling, among two clients and in one round."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flower_dp.audit import methods
from flower_dp.audit.case import Case
from flower_dp.core import checks
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.methods import METHODS
from flower_dp.strategies import AdaptiveClip

Own = Mapping[str, Any]
# Settings of a method's table that its strategy takes under the same name, if they are not empty.
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
    method = str(config["method"])
    checks.one_of("method", method, tuple(METHODS))
    own = {
        key.removeprefix(f"{method}.").replace("-", "_"): value for key, value in config.items() if key.startswith(f"{method}.")
    }
    case: Case = METHODS[method].load("audit")(f"{name}, one round", own, config)
    return case


def fedsgd_dpc(label: str, own: Own, config: Own) -> Case:
    """Return the case of FedSGD-DPC's settings."""
    rest = {"mechanism": own["mechanism"], "sampling_rate": own["record_sampling_rate"], "relation": own["relation"]}
    return methods.fedsgd_dpc(label, **_budget(label, own), **rest)


def nbafl(label: str, own: Own, config: Own) -> Case:
    """Return the case of NbAFL's settings."""
    paper = {} if own["epsilon"] else {"epsilon": None, "paper_epsilon": own["paper_epsilon"]}
    return methods.nbafl(label, **_budget(label, own, own["epsilon"] or own["paper_epsilon"]) | paper)


def dp_pasgd(label: str, own: Own, config: Own) -> Case:
    """Return the case of DP-PASGD's settings."""
    steps = {"num_local_steps": own["num_local_steps"], "batch_sampling": own["batch_sampling"]}
    return methods.dp_pasgd(label, **_budget(label, own), **steps, num_records=2 if own["batch_sampling"] == "poisson" else 1)


def dp_fedpaq(label: str, own: Own, config: Own) -> Case:
    """Return the case of DP-FedPAQ's settings."""
    return _local_steps(label, own, scaffold=False)


def scaffold(label: str, own: Own, config: Own) -> Case:
    """Return the case of SCAFFOLD's settings."""
    return _local_steps(label, own, scaffold=True)


def client_level(label: str, own: Own, config: Own) -> Case:
    """Return the case of the settings of a method with one noised sum, of which nothing is left out after the noise."""
    return _client_level(label, own, config, lossy=False, top_k=False)


def dp_fedsam(label: str, own: Own, config: Own) -> Case:
    """Return the case of DP-FedSAM's settings, whose noised sum or shares may be compressed."""
    top_k = own["keep_ratio"] < 1
    return _client_level(label, own, config, lossy=top_k or bool(own["quantization_levels"]), top_k=top_k)


def _budget(label: str, own: Own, epsilon: float | None = None) -> dict[str, Any]:
    if not math.isfinite(own["epsilon"] if epsilon is None else epsilon):
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    return {"epsilon": own["epsilon"], "clip_norm": own["clip_norm"], "delta": own["delta"]}


def _local_steps(label: str, own: Own, *, scaffold: bool) -> Case:
    levels, sensitivity = own["quantization_levels"] or None, own["sensitivity"]
    return methods.local_steps(
        label, **_budget(label, own), scaffold=scaffold, quantization_levels=levels, sensitivity=sensitivity
    )


def _client_level(label: str, own: Own, config: Own, *, lossy: bool, top_k: bool) -> Case:
    make, clip = METHODS[config["method"]].load("strategy"), own["clip_norm"]
    passed = {key: own[key] for key in _PASSED if own.get(key)}
    if passed.get("placement") == "distributed":
        passed |= {"trusted_server": own["trusted_server"]}
    delta = own["delta"] or config["num-clients"] ** -1.1
    multiplier = own["noise_multiplier"]
    if own["epsilon"]:
        sampling = _sampler(config)
        run: Any = make(  # the noise of the whole run
            clip_norm=clip,
            epsilon=own["epsilon"],
            num_rounds=config["num-rounds"],
            sampling=sampling,
            num_clients=config["num-clients"],
            delta=delta,
            **passed,
        )
        multiplier = run.rules.release.mechanism.noise_multiplier
    if not multiplier:
        raise ValueError(f"{label}: is not private, so there is nothing to audit")
    training = methods.BLURS if config["blur-strength"] or config["update-keep-ratio"] < 1 else methods.TRAINING
    num_clients = methods.clients_of(central=passed.get("placement") == "central", lossy=lossy)
    sampled = _sampler({**config, "num-clients": num_clients, "cohort-size": num_clients // 2})
    return methods.client_level(
        label,
        make,
        noise_multiplier=multiplier,
        clip_norm=AdaptiveClip(initial=clip, smallest=clip / 1000, largest=clip * 1000) if own["clip_quantile"] else clip,
        delta=delta,
        sampling=FullSampling() if isinstance(sampled, RoundRobinSampling) else sampled,
        training=replace(training, sam_radius=own.get("sam_radius", 0.0)),
        inputs=0.0 if top_k or training.sparsifier else 1.0,
        post_processed=lossy,
        **passed,
    )


def _sampler(config: Mapping[str, Any]) -> Sampler:
    kind = config["sampling"] or "poisson"
    if kind == "poisson":
        return PoissonSampling(sampling_rate=config["sampling-rate"])
    if kind == "full":
        return FullSampling()
    return (FixedSizeSampling if kind == "fixed-size" else RoundRobinSampling)(cohort_size=config["cohort-size"])
