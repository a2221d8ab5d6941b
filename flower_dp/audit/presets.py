"""The case of a run's settings: its own noise, clip, placement and sampling, among two clients and in one round."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flower_dp.audit import methods
from flower_dp.audit.case import Case
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.strategies import AdaptiveClip, DPFedAvg, DPFedSAM, DPStrategy, FedSMP

_CLIENT_LEVEL: dict[str, Callable[..., DPStrategy]] = {"dp-fedavg": DPFedAvg, "dp-fedsam": DPFedSAM, "fed-smp": FedSMP}
_LOCAL = ("fedsgd-dpc", "nbafl", "dp-pasgd", "dp-fedpaq", "scaffold")
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
        ValueError: if the run has no privacy.
    """
    method = str(config["method"])
    own = {
        key.removeprefix(f"{method}.").replace("-", "_"): value for key, value in config.items() if key.startswith(f"{method}.")
    }
    label = f"{name}, one round"
    if method in _CLIENT_LEVEL:
        return _client_level(label, method, own, config)
    if method not in _LOCAL:
        known = ", ".join([*_CLIENT_LEVEL, *_LOCAL])
        raise ValueError(f"method={method}: has no case for an audit; must be one of {known}")
    words = {"epsilon": own["epsilon"], "clip_norm": own["clip_norm"], "delta": own["delta"]}
    if method == "nbafl" and not own["epsilon"]:
        words |= {"epsilon": None, "paper_epsilon": own["paper_epsilon"]}
    if not math.isfinite(words["epsilon"] or words["paper_epsilon"]):
        raise ValueError(f"{name}: is not private, so there is nothing to audit")
    if method == "fedsgd-dpc":
        rest = {"mechanism": own["mechanism"], "sampling_rate": own["record_sampling_rate"], "relation": own["relation"]}
        return methods.fedsgd_dpc(label, **words, **rest)
    if method == "nbafl":
        return methods.nbafl(label, **words)
    if method == "dp-pasgd":
        poisson = own["batch_sampling"] == "poisson"
        steps = {"num_local_steps": own["num_local_steps"], "batch_sampling": own["batch_sampling"]}
        return methods.dp_pasgd(label, **words, **steps, num_records=2 if poisson else 1)
    levels, sensitivity = own["quantization_levels"] or None, own["sensitivity"]
    return methods.local_steps(label, **words, scaffold=method == "scaffold", quantization_levels=levels, sensitivity=sensitivity)


def _client_level(label: str, method: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> Case:
    make, clip = _CLIENT_LEVEL[method], own["clip_norm"]
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
    lossy = method == "dp-fedsam" and (passed.get("keep_ratio", 1) < 1 or "quantization_levels" in passed)
    top_k = lossy and passed.get("keep_ratio", 1) < 1
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
