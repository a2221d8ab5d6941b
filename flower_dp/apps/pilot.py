"""A pilot for the planners: constants of a preset's data, estimated by a fit of softmax regression. NOT PRIVATE.

The clients have the same records as in a run of the same run-config. The constants are those of softmax regression with an L2
term, whatever model the preset trains.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.records import config_of, deal
from flower_dp.apps.settings import Settings
from flower_dp.apps.tasks import module_of
from flower_dp.clients.training.records import TensorRecords
from flower_dp.planning.command import planner_of
from flower_dp.planning.constants import estimate
from flower_dp.planning.planner import Data, Inputs

DEFAULT_L2 = 0.1
# With more clients or records a pilot takes minutes, most of them for Newton's method on each client.
MOST_CLIENTS = 200
MOST_RECORDS = 6000

Client = tuple[np.ndarray, np.ndarray]


def pilot(
    method: str, run_config: Mapping[str, Any], *, given: Mapping[str, object] | None = None, l2: float | None = None
) -> Inputs:
    """Estimate a planning problem from the data and the settings of a run-config.

    The pilot estimates the constants from the data. If the run-config has the planned method and its module has a function
    `planning`, the settings give the keys of the noise (epsilon, clip_norm, ...). Values that the planner chooses stay free. The
    pilot uses at most `MOST_CLIENTS` clients and about `MOST_RECORDS` records, sampled with the run's seed. num_clients and
    num_records are always those of the run.

    NOT PRIVATE: the values are statistics of the clients' data, computed without noise.

    Args:
        method: name of a method with a planner.
        run_config: all settings of the app, by run-config key.
        given: known keys of the problem; some values depend on them, and the caller gives them precedence.
        l2: L2 coefficient of the loss, > 0; None: the run-config's weight-decay, or `DEFAULT_L2` if that is 0.

    Raises:
        ValueError: naming an invalid setting, or an `l2` with which the fit does not converge.
    """
    known = dict(given or {})
    run = ParsedRunConfig.of(run_config)
    settings = run.settings
    dealt, classes = deal(config_of(run_config)).clients, module_of(settings.task).CLASSES
    rng = np.random.default_rng((settings.seed, 1))
    clients = _rows(dealt, classes, rng)
    coefficient, source = (DEFAULT_L2, "the default") if l2 is None else (l2, "as given")
    if l2 is None and settings.weight_decay > 0:
        coefficient, source = settings.weight_decay, "the preset's weight-decay"
    try:
        constants = estimate(clients, l2=coefficient, num_classes=len(classes), fit_bias=settings.model_bias)
    except RuntimeError as error:
        raise ValueError(f"l2={coefficient:g}: {error}") from error
    notes = [
        _sample_note(settings, dealt, clients),
        f"the loss of the pilot is softmax regression {'with' if settings.model_bias else 'without'} bias"
        f" and an L2 coefficient of {coefficient:g} ({source}), which strong_convexity or pl_constant is",
    ]
    if settings.model != "logistic":
        notes.append(f"the preset trains model={settings.model}; the bounds hold only for the pilot's softmax regression")
    own = settings.method == method
    if not own:
        notes.append(f"the preset's method is {settings.method}: only its settings of the data were used")
    sizes = tuple(len(records) for records in dealt.values())
    dimension = sum(parameter.numel() for parameter in run.model().parameters())
    data = Data(constants=constants, num_records=sizes, dimension=dimension)
    chosen = run.planning(data, known) if own else Inputs(values={})
    estimated = planner_of(method).from_data(data, {**chosen.values, **known})
    return Inputs(values={**estimated.values, **chosen.values}, notes=(*notes, *estimated.notes, *chosen.notes))


def _rows(dealt: Mapping[str, TensorRecords], classes: tuple[int, ...], rng: np.random.Generator) -> list[Client]:
    """Return clients' records: features [n_i, f] as the model gets them, and class numbers [n_i], counted from 0."""
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
        rows.append((inputs.flatten(1).double().numpy(), np.searchsorted(classes, targets.numpy())))
    return rows


def _sample_note(settings: Settings, dealt: Mapping[str, TensorRecords], clients: list[Client]) -> str:
    total, used = sum(map(len, dealt.values())), sum(len(labels) for _, labels in clients)
    sample = f"{used} records of {len(clients)} clients, dealt as in a run (partition={settings.partition}, seed={settings.seed})"
    if (used, len(clients)) == (total, len(dealt)):
        return f"estimated from all {sample}"
    return (
        f"estimated from {sample}, a random part of the {total} records of {len(dealt)} clients: it may miss the largest values"
    )
