"""Make the arguments of strategies that several methods share from the common settings; `client_parts` does so for clients."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flower_dp.apps.settings import Settings, default_of, key_of
from flower_dp.core import checks
from flower_dp.core.checks import BadValue, bad, refusal
from flower_dp.core.participation import MinimumSeparationSampling, default_separation
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling, Sampler
from flower_dp.strategies import AdaptiveClip, EvaluationBudget, LocalEvaluation, PrivateEvaluation

N = TypeVar("N", int, float)
# Every client's number of records by name; methods with local noise treat the numbers as public.
Sizes = Callable[[], Mapping[str, int]]
# With fewer clients num_clients^-1.1 is too large a delta to be a guarantee.
_FEWEST_FOR_DEFAULT_DELTA = 100
# Default ratio of an adaptive clip norm's upper limit to its first value, and of its first value to its lower limit.
_CLIP_RANGE = 1000.0


def sampler_of(settings: Settings) -> Sampler:
    """Return the sampler of the clients of a round."""
    if settings.sampling == "full":
        return FullSampling()
    if settings.sampling == "poisson":
        return PoissonSampling(sampling_rate=settings.sampling_rate)
    size = cohort_size_of(settings)
    if settings.sampling == "minimum-separation":
        separation = settings.min_separation or default_separation(settings.num_clients, size)
        most = settings.max_participations or None
        if separation * size > settings.num_clients:
            why = f"cohort-size={size} of num-clients={settings.num_clients} can be full only with at most"
            raise refusal("min-separation", separation, f"{why} {settings.num_clients // size}")
        if most and most * settings.num_clients < settings.num_rounds * size:
            needed = -(-settings.num_rounds * size // settings.num_clients)
            why = f"num-rounds={settings.num_rounds} with cohort-size={size} needs {needed} of each of num-clients="
            raise refusal("max-participations", most, f"{why}{settings.num_clients}")
        return MinimumSeparationSampling(cohort_size=size, min_separation=separation, max_participations=most)
    return FixedSizeSampling(cohort_size=size) if settings.sampling == "fixed-size" else RoundRobinSampling(cohort_size=size)


def cohort_size_of(settings: Settings) -> int:
    """Return the size of fixed-size cohorts."""
    return checks.integer("cohort-size", settings.cohort_size, at_least=1, at_most=settings.num_clients)


def per_client(settings: Settings, key: str, text: str, default: N) -> dict[str, N]:
    """Return every client's number by name, from comma-separated text; the default for all if the text is empty.

    Raises:
        ValueError: if a value does not have the default's type, or the count is not the number of clients.
    """
    names, kind = settings.client_names(), type(default)
    if not text:
        return dict.fromkeys(names, default)
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        raise bad(key, text, f"comma-separated {'whole numbers' if kind is int else 'numbers'}") from None
    if len(values) != len(names):
        raise BadValue(key, f"{key}: has {len(values)} numbers; must have num-clients={len(names)}, one per client")
    return dict(zip(names, values, strict=True))


def noise_of(settings: Settings, own: Any) -> dict[str, Any]:
    """Return the noise multiplier; if epsilon is set, no multiplier and the number of rounds that epsilon covers.

    Raises:
        ValueError: if epsilon is set together with a noise multiplier or target that is not the default.
    """
    target = getattr(own, "target_epsilon", None)  # a method whose whole run is charged at its start has none
    if target is not None:
        checks.number("target-epsilon", target, at_least=0)
    if not checks.number("epsilon", own.epsilon, at_least=0):
        return {"noise_multiplier": own.noise_multiplier}  # 0: NOT PRIVATE
    for name, fit in (("noise_multiplier", ()), ("target_epsilon", (0.0, own.epsilon))):
        if hasattr(own, name) and (value := getattr(own, name)) not in (default_of(own, name), *fit):
            raise refusal(
                key_of(name),
                value,
                f"the table's epsilon={own.epsilon:g} already determines the noise; leave this out, or set that epsilon to 0",
            )
    return {"noise_multiplier": None, "target_epsilon": None, "num_rounds": settings.num_rounds}


def clip_norm_of(own: Any) -> float | AdaptiveClip:
    """Return the clip norm of a method with one noised sum, adaptive if it has a quantile.

    Raises:
        ValueError: for settings of an adaptive clip norm without a quantile.
    """
    options = ("clip_count_noise_std", "min_clip_norm", "max_clip_norm")
    if not own.clip_quantile:
        for name in options:
            if value := getattr(own, name):
                raise refusal(key_of(name), value, "is read with clip-quantile > 0 only, which makes the clip norm adaptive")
        return float(own.clip_norm)
    return AdaptiveClip(
        initial_clip_norm=own.clip_norm,
        target_quantile=own.clip_quantile,
        learning_rate=own.clip_learning_rate,
        count_noise_std=own.clip_count_noise_std or None,
        min_clip_norm=own.min_clip_norm or own.clip_norm / _CLIP_RANGE,
        max_clip_norm=own.max_clip_norm or own.clip_norm * _CLIP_RANGE,
    )


def evaluation_of(settings: Settings) -> PrivateEvaluation | None:
    """Return the private evaluation of a run with one noised sum, or None."""
    own = settings.evaluation
    if not own.every:
        return None
    own.refuse(
        "epsilon",
        f"is read by methods with a budget per client; method={settings.method!r} has private-evaluation.noise-multiplier",
    )
    if settings.sampling == "minimum-separation" and not own.sampling_rate:
        why = "must be above 0 with sampling='minimum-separation', which evaluations do not keep"
        raise refusal("private-evaluation.sampling-rate", own.sampling_rate, why)
    return PrivateEvaluation(
        noise_multiplier=own.noise_multiplier,
        sampling=PoissonSampling(sampling_rate=own.sampling_rate) if own.sampling_rate else sampler_of(settings),
        metrics=own.bounds(),
        every=own.every,
    )


def local_evaluation_of(settings: Settings) -> LocalEvaluation | None:
    """Return the private evaluation of a run with a budget per client, or None."""
    budget = evaluation_budget_of(settings)
    if budget is None:
        return None
    rate = settings.evaluation.sampling_rate
    return LocalEvaluation(
        budget=budget,
        metrics=settings.evaluation.bounds(),
        every=settings.evaluation.every,
        sampling=PoissonSampling(sampling_rate=rate) if rate else FullSampling(),
    )


def evaluation_budget_of(settings: Settings) -> EvaluationBudget | None:
    """Return every client's budget of private evaluations, the same on both sides, or None.

    Raises:
        ValueError: if it is missing.
    """
    own = settings.evaluation
    if not own.every:
        return None
    own.refuse("noise_multiplier", f"is not read by method={settings.method!r}; private-evaluation.epsilon determines the noise")
    if not own.epsilon:
        why = f"must be above 0 for method={settings.method!r}: it is each client's budget for all evaluations"
        raise refusal("private-evaluation.epsilon", own.epsilon, why)
    return EvaluationBudget(epsilon=own.epsilon, num_evaluations=max(1, settings.num_rounds // own.every))


def local_arguments(settings: Settings, sizes: Sizes) -> dict[str, Any]:
    """Return the arguments that every strategy with a budget per client takes."""
    return {
        "num_clients": settings.num_clients,
        "num_records": dict(sizes()),
        "evaluation": local_evaluation_of(settings),
    }


def client_level_delta(delta: float, settings: Settings, *, private: bool) -> float:
    """Return the delta of a client-level method: as set, or num_clients^-1.1.

    Raises:
        ValueError: if delta is not set and the run has too few clients for the default to be a guarantee.
    """
    checks.number("delta", delta, at_least=0, below=1)
    default = float(settings.num_clients**-1.1)
    if not delta and private and settings.num_clients < _FEWEST_FOR_DEFAULT_DELTA:
        size = settings.num_clients
        why = f"num-clients={size} gives {default:.3g} by default, which is not a guarantee; set delta far below 1/{size}"
        raise BadValue("delta", f"delta: {why}")
    return delta or default
