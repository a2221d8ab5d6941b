"""What users construct says what it takes: every argument of its own by name, type and default, each with a line in the docstring."""

import inspect
import re

import pytest

import flower_dp.strategies
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg, DPStrategy

STRATEGIES = [one for one in vars(flower_dp.strategies).values() if inspect.isclass(one) and issubclass(one, DPStrategy)]
STRATEGIES.remove(DPStrategy)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.__name__)
def test_a_strategy_spells_out_its_arguments_and_documents_each(strategy):
    _, *parameters = inspect.signature(strategy.__init__).parameters.values()
    own = [one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
    assert {one.kind for one in own} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(one.annotation is not inspect.Parameter.empty for one in own)
    (rest,) = [one for one in parameters if one not in own]
    text = inspect.getdoc(strategy).partition("Args:\n")[2].partition("Raises:")[0]
    assert re.findall(r"^ {4}(\w+):", text, re.MULTILINE) == [*(one.name for one in own), rest.name]


def test_an_argument_that_no_strategy_has_is_refused():
    with pytest.raises(TypeError, match="DPFedAvg: unexpected keyword argument 'noise_sed'"):
        DPFedAvg(clip_norm=0.5, noise_multiplier=1.0, sampling=FullSampling(), num_clients=10, delta=1e-3, noise_sed=1)
