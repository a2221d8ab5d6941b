"""A pilot for the planners: the constants of a preset's data, by a fit of softmax regression. NOT PRIVATE.

The clients hold what they hold in a run of the same run-config. The constants are those of softmax regression with the loss's
L2 term, whatever model the preset trains.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from apps.client_app import all_records
from apps.settings import Settings
from apps.tasks.models import make
from flower_dp.clients.records import TensorRecords
from flower_dp.planning.constants import Constants, estimate
from flower_dp.planning.fedsgd_dpc_bound import METHOD as FEDSGD_DPC
from flower_dp.planning.nbafl_bound import best_proximal

DEFAULT_L2 = 0.1
# A pilot of more clients or records takes minutes, most of them for Newton's method on each client.
MOST_CLIENTS = 200
MOST_RECORDS = 6000

Client = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """Keys of a planning problem, and where they come from, in sentences."""

    values: Mapping[str, object]
    notes: tuple[str, ...]


def pilot(
    method: str, run_config: Mapping[str, Any], *, given: Mapping[str, object] | None = None, l2: float | None = None
) -> Pilot:
    """Estimate a planning problem from the data and the settings of a run-config.

    Data give the constants. Settings give what they say of the noise (epsilon, clip_norm, ...), if the run-config is of the
    planned method; what the planner is to find stays free. Large tasks are thinned to `MOST_CLIENTS` clients and `MOST_RECORDS`
    records, drawn from the run's seed; num_clients and num_records are always those of the run.

    NOT PRIVATE: the values are statistics of the clients' data, computed without noise.

    Args:
        method: a method with a planner.
        run_config: all settings of the app, by run-config key.
        given: keys that are known already; some values follow from them. The caller lets them win.
        l2: L2 coefficient of the loss, > 0; None: the run-config's weight-decay, or `DEFAULT_L2` where that is 0.

    Raises:
        ValueError: naming a setting that makes no sense, or an `l2` with which the fit does not converge.
    """
    known = dict(given or {})
    settings = Settings.of(run_config)
    _, dealt = all_records(tuple(sorted(run_config.items())))
    rng = np.random.default_rng((settings.seed, 1))
    clients = _rows(dealt, rng)
    coefficient, source = (l2, "as asked") if l2 is not None else _coefficient(settings)
    classes = int(next(iter(dealt.values())).targets.max()) + 1
    try:
        constants = estimate(clients, l2=coefficient, num_classes=classes, fit_bias=settings.model_bias)
    except RuntimeError as error:
        raise ValueError(f"l2={coefficient:g}: {error}") from error
    notes = [
        _what(settings, dealt, clients),
        f"the loss of the pilot is softmax regression {'with' if settings.model_bias else 'without'} bias"
        f" and an L2 coefficient of {coefficient:g} ({source}), which strong_convexity or pl_constant is",
    ]
    if settings.model != "logistic":
        notes.append(f"the preset trains model={settings.model}; the bounds prove nothing for that, only for the pilot's")
    own = settings.method == method
    if not own:
        notes.append(f"the preset's method is {settings.method}: of its settings only those of the data were taken")
    fill = _fedsgd_dpc if method == FEDSGD_DPC else _nbafl
    sizes = [len(records) for records in dealt.values()]
    values, more = fill(constants, settings, sizes, known, own=own)
    return Pilot(values=values, notes=(*notes, *more))


def _fedsgd_dpc(
    constants: Constants, settings: Settings, sizes: list[int], given: Mapping[str, object], *, own: bool
) -> tuple[dict[str, object], list[str]]:
    mechanism = given.get("mechanism", settings.mechanism if own else None)
    gaussian = mechanism == "gaussian"
    values = constants.fedsgd_dpc(mechanism="gaussian" if gaussian else "laplace", optima="joint")
    records: int | list[int] = sizes[0] if len(set(sizes)) == 1 else sizes
    values |= {"num_clients": len(sizes), "num_records": records, "dimension": _dimension(settings)}
    if gaussian and len(constants.gradient_variance) < len(sizes):
        values["gradient_variance"] = max(constants.gradient_variance)
    notes = ["heterogeneity and initial_distance are as the bound defines them, from the joint optimum"]
    if not own:
        if "clip_norm" not in given:
            notes.append("clip_norm is the largest norm of a record's gradient in the pilot: usually far too much")
        return values, notes
    budgets = settings.budgets().values()
    values |= {
        "mechanism": settings.mechanism,
        "clip_norm": settings.clip_norm,
        "epsilon": list(budgets) if settings.client_epsilons else settings.epsilon,
    }
    if gaussian:
        values["sampling_rate"] = settings.record_sampling_rate
        if settings.delta:
            values["delta"] = settings.delta
        if settings.noise_constant:
            values["noise_constant"] = settings.noise_constant
        if not {"num_rounds", "max_rounds"} & given.keys():
            values["max_rounds"] = settings.num_rounds
            notes.append(f"max_rounds={settings.num_rounds} is the preset's num-rounds")
    return values, notes


def _nbafl(
    constants: Constants, settings: Settings, sizes: list[int], given: Mapping[str, object], *, own: bool
) -> tuple[dict[str, object], list[str]]:
    values = constants.nbafl() | {"num_clients": len(sizes), "min_records": min(sizes)}
    notes = []
    rounds = given.get("num_rounds", settings.num_rounds if own else None)
    if own:
        values |= {
            "num_rounds": settings.num_rounds,
            "cohort_size": settings.cohort_size if settings.sampling == "fixed-size" else len(sizes),
            "epsilon": settings.epsilon,
            "clip_norm": settings.clip_norm,
        }
        values |= {"delta": settings.delta} if settings.delta else {}
        if isinstance(rounds, int):
            values["uplink_exposures"] = min(settings.uplink_exposures or rounds, rounds)
    if isinstance(rounds, int) and "max_rounds" not in given:
        values["max_rounds"] = 10 * rounds
        notes.append(f"max_rounds={10 * rounds} is ten times num_rounds")
    if "proximal" not in given:
        values["proximal"], said = _proximal(settings if own else None, {**values, **given})
        notes.append(said)
    return values, notes


def _proximal(settings: Settings | None, values: Mapping[str, Any]) -> tuple[float, str]:
    """Return the preset's coefficient if the bound says anything there, else the one of the best bound."""
    best = best_proximal(smoothness=values["smoothness"], dissimilarity=values["dissimilarity"])
    if settings is not None and settings.proximal > best / 2:
        return settings.proximal, f"proximal={settings.proximal:g} is the preset's"
    why = f": at the preset's {settings.proximal:g} the bound says nothing" if settings is not None else ""
    return best, f"proximal={best:g} is what the bound likes best{why}; the bound needs more than {best / 2:g}"


def _coefficient(settings: Settings) -> tuple[float, str]:
    if settings.weight_decay > 0:
        return settings.weight_decay, "the preset's weight-decay"
    return DEFAULT_L2, "the default"


def _dimension(settings: Settings) -> int:
    model: nn.Module = make(settings.model, bias=settings.model_bias, seed=settings.seed)
    return sum(parameter.numel() for parameter in model.parameters())


def _rows(dealt: Mapping[str, TensorRecords], rng: np.random.Generator) -> list[Client]:
    """Return clients' records, as the model gets them: features [n_i, f], labels [n_i]."""
    names = list(dealt)
    if len(names) > MOST_CLIENTS:
        names = [names[index] for index in sorted(rng.choice(len(names), MOST_CLIENTS, replace=False))]
    keep = min(1.0, MOST_RECORDS / sum(len(dealt[name]) for name in names))
    rows = []
    for name in names:
        size = len(dealt[name])
        kept = size if keep == 1 else math.ceil(keep * size)
        positions = np.arange(size) if kept == size else np.sort(rng.choice(size, kept, replace=False))
        inputs, targets = dealt[name].batch(torch.from_numpy(positions), torch.device("cpu"))
        rows.append((inputs.flatten(1).double().numpy(), targets.numpy()))
    return rows


def _what(settings: Settings, dealt: Mapping[str, TensorRecords], clients: list[Client]) -> str:
    total, used = sum(map(len, dealt.values())), sum(len(labels) for _, labels in clients)
    words = f"{used} records of {len(clients)} clients, dealt as in a run (partition={settings.partition}, seed={settings.seed})"
    if (used, len(clients)) == (total, len(dealt)):
        return f"estimated from all {words}"
    return f"estimated from {words}, a random part of the {total} records of {len(dealt)} clients: largest values may be missed"
