"""The settings of a method agree with the arguments of its strategy, its recipe and their parts.

What a setting changes is found by trial: each gets another value, and the arguments that the app then passes are compared.
"""

import inspect
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import pytest

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.settings import SAMPLINGS
from flower_dp.clients import Training
from flower_dp.methods import METHODS
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies.rules import StrategyOptions
from tests.app_runs import DEFAULTS

NUM_CLIENTS = 200
# What a method's defaults lack for a run.
NEEDED = {name: {f"{name}.update-clip-norm": 0.1} for name in ("dp-fedpaq", "scaffold")}
# Another value for settings whose values are words; an evaluation and a model need other settings beside.
WORDS: dict[str, Any] = {
    "relation": ("replace-one", "add-or-remove-one"),
    "placement": ("central", "distributed"),
    "mechanism": ("gaussian",),
    "aggregation": ("uniform",),
    "sensitivity": ("per-step",),
    "batch-sampling": ("poisson",),
    "calibration": ("zcdp", "paper"),
    "best-model-metric": ("accuracy",),
    "client-epsilons": (",".join(["3"] * NUM_CLIENTS),),
    "client-batch-sizes": (",".join(["3"] * NUM_CLIENTS),),
    "optimizer": ("adam",),
    "mask": ("top-k",),
    "noise": ("bisr", "tree"),
    "training-engine": ("one-by-one", "batched"),
    "sampling": SAMPLINGS,
    "server-ledger": ("/srv/ledger.sqlite",),
}
BESIDE = {
    "fed-smp.random-ratio": [{"fed-smp.mask": "top-k", "fed-smp.random-ratio": 0.3}],
    "dp-ftrl.bands": [{"dp-ftrl.noise": "banded", "dp-ftrl.bands": 3}],
    "model": [{"task": "vehicle", "model": "linear-svm"}],
    "cohort-size": [{"sampling": sampling, "cohort-size": 7} for sampling in ("fixed-size", "round-robin")],
    "private-evaluation.every": [
        {"private-evaluation.every": 1},
        {"private-evaluation.every": 1, "private-evaluation.epsilon": 0.5},
        {"private-evaluation.every": 1, "private-evaluation.sampling-rate": 0.1},
    ],
    "private-evaluation.metrics": [{"private-evaluation.every": 1, "private-evaluation.metrics": "loss=5"}],
}
# Settings that are read beside a quantile alone, which makes the clip norm adaptive.
ADAPTIVE = {"clip-learning-rate": 0.3, "clip-count-noise-std": 50.0, "min-clip-norm": 0.01, "max-clip-norm": 7.0}
# Arguments that no setting changes, as `Class.argument`; those of any method under "".
OPTIONS = ("frozen_arrays", "max_clients_per_node", "max_new_clients", "noise_seed", "on_round", "registration_timeout")
UNSET = {
    "": {"Training.num_local_steps", "Options.server_optimizer", *(f"Options.{name}" for name in OPTIONS)},
    "dp-fedavg": {"DPFedAvg.noise", "Training.sam_radius"},
    "dp-fedsam": {"DPFedSAM.noise"},
    "dp-ftrl": {"Training.sam_radius"},
    "fed-smp": {"Training.sam_radius"},
    "nbafl": {"NbAFL.min_records", "Training.sam_radius", "Training.sparsifier"},
    "scaffold": {"ScaffoldRecipe.common", "ScaffoldRecipe.own"},
}
# Settings of words that no argument depends on: data, and the run's folder.
DATA = ("task", "data-dir", "partition", "output-dir", "resume", "method")

# Of the arguments that the app passes, by class and argument: `DPFedSAM.clip_norm`.
Passed = dict[str, Any]


class PassedError(Exception):
    """The arguments are known; the object is not needed."""


def strategy_of(name):
    return METHODS[name].load("strategy")


def recipe_of(name):
    return [METHODS[name].load("recipe")] if METHODS[name].recipe else []


def kinds_of(name):
    """The classes whose arguments are a method's: its strategy, its recipe, and their parts."""
    return [strategy_of(name), *recipe_of(name), Training, FedPAQSteps]


def passed(config, size=300) -> Passed:
    """The arguments that the app passes to a method's classes, also to those that refuse them."""
    run = ParsedRunConfig.of(config)
    name, clients = run.settings.method, run.settings.client_names()
    found: Passed = {}
    # A client of one noised sum is made from the strategy's rules.
    stops = {strategy_of(name), *recipe_of(name)}
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds_of(name):

            @wraps(kind.__init__)
            def record(self, *, _kind=kind, _init=kind.__init__, **keywords):
                if type(self) is _kind:
                    found.update({named(_kind, key): value for key, value in keywords.items()})
                    if _kind in stops:
                        raise PassedError
                _init(self, **keywords)

            patch.setattr(kind, "__init__", record)
        with suppress(ValueError, PassedError):
            run.strategy(lambda: dict.fromkeys(clients, size))
        stops.remove(strategy_of(name))
        with suppress(ValueError, PassedError):
            run.client(run.model(), {clients[0]: range(size)}, lambda: dict.fromkeys(clients, size))
    return found


def named(kind, argument):
    return f"{'Options' if argument in StrategyOptions.__annotations__ else kind.__name__}.{argument}"


@cache
def base(name) -> dict[str, Any]:
    """The defaults with a method, and with the first sampling that it takes."""
    for sampling in (one for one in ("poisson", "full", "round-robin", "minimum-separation") if one in METHODS[name].samplings):
        config = {**DEFAULTS, "method": name, "num-clients": NUM_CLIENTS, "sampling": sampling, **NEEDED.get(name, {})}
        config["cohort-size"] = 5 if sampling in ("round-robin", "minimum-separation") else 0
        if named(strategy_of(name), "delta") in passed(config):
            return config
    raise AssertionError(name)


def others(key, value):
    """Changes of one setting."""
    if key in BESIDE:
        return BESIDE[key]
    table, _, name = key.rpartition(".")
    if name in ADAPTIVE:
        return [{f"{table}.clip-quantile": 0.5, key: ADAPTIVE[name]}]
    if isinstance(value, bool):
        return [{key: not value}]
    if isinstance(value, str):
        return [{key: word} for word in WORDS[key.rpartition(".")[2]] if word != value]
    return [{key: value + 1 if isinstance(value, int) else value / 2 or 0.25}]


@cache
def changed_by(name) -> dict[str, set[str]]:
    """The arguments that each setting of a method changes; those that the sizes of the clients' data change are the task's."""
    config = base(name)
    before = passed(config)

    def changes(after):
        return {one for one in after if one not in before or after[one] != before[one]}

    found: dict[str, set[str]] = {}
    for key in [key for key in config if "." not in key or key.startswith((f"{name}.", "private-evaluation."))]:
        found[key] = set()
        for change in [] if key in DATA else others(key, config[key]):
            with suppress(ValueError):
                found[key] |= changes(passed({**config, **change}))
    return found | {"task": changes(passed(config, size=301))}


def arguments(name):
    """The arguments of a method's classes that the app constructs."""
    made = {one.partition(".")[0] for one in passed(base(name))}
    found = set()
    for kind in [kind for kind in kinds_of(name) if kind.__name__ in made]:
        _, *parameters = inspect.signature(kind.__init__).parameters.values()
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                found |= {f"Options.{option}" for option in StrategyOptions.__annotations__}
            else:
                assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
                found.add(named(kind, parameter.name))
    return found


@cache
def unset(name):
    """The arguments that no setting changes."""
    return arguments(name) - set().union(*changed_by(name).values())


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_is_set_by_a_setting_or_listed_as_one_that_is_not(name):
    assert sorted(unset(name) - set(UNSET[""])) == sorted(UNSET.get(name, ()))


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_of_a_method_sets_an_argument(name):
    table = {key: found for key, found in changed_by(name).items() if key.startswith(f"{name}.")}
    assert table
    assert [key for key, found in table.items() if not found] == []


def test_what_is_listed_for_all_methods_is_neither_gone_nor_listed_twice():
    assert set(UNSET[""]) <= set().union(*map(unset, METHODS))
    assert not set(UNSET[""]) & {one for name in METHODS for one in UNSET.get(name, ())}
