"""The registry: every method's parts exist and bear its name, and whoever knows methods knows those and no others."""

import re

import pytest

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.audit.methods import case_of
from flower_dp.methods import METHODS, TRAINING
from flower_dp.planning.command import planner_of
from flower_dp.planning.planner import ProblemError
from flower_dp.running.apps import own_app, presets
from flower_dp.strategies import DPStrategy
from tests import contracts

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@every_method
def test_every_part_exists_and_bears_the_methods_name(method):
    assert issubclass(method.load("strategy"), DPStrategy)
    assert not method.recipe or method.load("recipe").method == method.name
    assert not method.planner or method.name == method.load("planner").Problem.METHOD
    assert callable(method.load("settings").arguments)
    assert callable(method.load("audit"))
    assert set(method.reads) <= set(TRAINING)


def test_every_method_has_a_contract_entry_a_preset_and_a_table_of_settings():
    assert {entry.name for entry in contracts.METHODS} == set(METHODS)
    texts = [path.read_text() for path in presets().values()]
    default = own_app().defaults["method"]
    assert {*re.findall(r'^method = "(.*)"', "\n".join(texts), re.M), default} == set(METHODS)
    tables = {key.partition(".")[0] for key in own_app().defaults if "." in key}
    assert [name for name in METHODS if name not in tables] == []


def test_the_contract_entries_strategies_are_the_registrys():
    for entry in contracts.METHODS:
        strategy = entry.strategy(contracts.Words())
        assert type(strategy) is METHODS[entry.name].load("strategy")
        assert strategy.rules.training.name == entry.name


def test_an_unknown_method_is_an_error_everywhere():
    config = {**own_app().defaults, "method": "dp-fedfoo"}
    for ask in (lambda: ParsedRunConfig.of(config), lambda: case_of("mine", config)):
        with pytest.raises(ValueError, match="method='dp-fedfoo': must be one of dp-fedavg, dp-fedpaq"):
            ask()
    with pytest.raises(ProblemError, match="method='dp-fedfoo': has no planner"):
        planner_of("dp-fedfoo")
