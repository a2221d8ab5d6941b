import tomllib
from pathlib import Path

import pytest

from flower_dp.apps.methods import Run
from flower_dp.apps.parts import sampler_of
from flower_dp.apps.refusals import check
from flower_dp.apps.settings import SAMPLINGS, key_of
from flower_dp.apps.tasks import TASKS, module_of
from flower_dp.apps.tasks.models import _KINDS, MODELS
from flower_dp.apps.unread import unread, with_method
from flower_dp.core.checks import SettingsError
from flower_dp.methods import METHODS, TRAINING
from flower_dp.running.apps import flatten, own_app
from flower_dp.strategies.run_state import RunState

ROOT = Path(__file__).parents[2]
DEFAULTS = own_app().defaults
PRESETS = {
    path.stem: flatten(tomllib.loads(path.read_text()))
    for path in sorted((ROOT / "flower_dp" / "apps" / "presets").glob("*.toml"))
}


def refused(config, *, given=(), built=False):
    with pytest.raises(SettingsError) as error:
        check(config, defaults=DEFAULTS, given=given, built=built)
    return str(error.value).splitlines()


def accept(config, *, built=False):
    check(config, defaults=DEFAULTS, given=(), built=built)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_accepted(name):
    accept(
        {
            key: "" if key == "data-dir" and PRESETS[name].get("task", "mnist") == "mnist" else value
            for key, value in PRESETS[name].items()
        }
        | ({"data-dir": str(ROOT)} if "data-dir" in PRESETS[name] else {})
    )


def test_all_problems_are_told_at_once():
    config = {"method": "fedsgd-dpc", "sampling": "poisson", "sampling-rate": 0.2, "batch-size": 8, "momentum": 0.0}
    lines = refused({**config, "fedsgd-dpc.clip-norm": -1.0, "fedsgd-dpc.mechanism": "none", "local-epochs": "two"})
    named = [
        "local-epochs='two'",
        "sampling='poisson'",
        "sampling-rate=0.2",
        "batch-size=8",
        "fedsgd-dpc.mechanism",
        "fedsgd-dpc.clip-norm",
    ]
    assert sorted(line.partition(":")[0].partition("=")[0] for line in lines) == sorted(name.partition("=")[0] for name in named)


def test_an_argument_of_another_name_is_told_by_its_setting():
    """By the error's field: it was told as `sampling-rate`, which is another setting."""
    (line,) = refused({"method": "fedsgd-dpc", "fedsgd-dpc.record-sampling-rate": 0.5})
    assert line.startswith("fedsgd-dpc.record-sampling-rate=0.5: must be 1 for mechanism='laplace'")


def test_a_seed_that_torch_can_not_take_is_refused():
    lines = refused({"seed": 2**63})
    assert lines == ["seed=9223372036854775808: must be a whole number >= 0 and <= 9223372036854775807"]
    accept({"seed": 2**63 - 1})


def test_what_follows_from_a_refused_setting_is_no_news():
    lines = refused({"blur-strength": -1.0, "blur-bound": 0.5})
    assert lines == ["blur-strength=-1.0: must be a finite number >= 0"]
    assert [line.partition("=")[0] for line in refused({"task": "foo", "model": "bar"})] == ["model", "task"]
    assert len(refused({"num-clients": -1, "method": "dp-pasgd", "dp-pasgd.client-epsilons": "1,2"})) == 1


@pytest.mark.parametrize("method", METHODS)
def test_defaults_and_what_means_off_are_never_refused(method):
    off = {"momentum": 0.0, "weight-decay": 0.0, "learning-rate-decay": 0.0, "sampling-rate": 0.0, "proximal": 0.0}
    off |= {key: DEFAULTS[key] for key in map(key_of, TRAINING) if key not in off}
    if METHODS[method].samplings[0] == "poisson":
        del off["sampling-rate"]
    Run.of({**DEFAULTS, "method": method, **off})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_its_samplings_and_no_others(method):
    samplings = METHODS[method].samplings
    assert Run.of({**DEFAULTS, "method": method}).settings.sampling == samplings[0]
    for sampling in SAMPLINGS:
        config = {**DEFAULTS, "method": method, "sampling": sampling, "cohort-size": 0 if sampling in ("full", "poisson") else 10}
        if sampling in samplings:
            assert sampler_of(Run.of(config).settings)
        else:
            with pytest.raises(SettingsError, match=f"sampling='{sampling}': must be (one of )?{', '.join(samplings)}"):
                Run.of(config)


def test_round_robin_without_a_size_asks_all_clients():
    assert Run.of({**DEFAULTS, "method": "fedsgd-dpc", "num-clients": 7}).settings.cohort_size == 7
    assert Run.of({**DEFAULTS, "method": "fedsgd-dpc", "num-clients": 7, "cohort-size": 3}).settings.cohort_size == 3


def test_the_chosen_methods_table_alone_counts():
    tables = {"nbafl.epsilon": -7.0, "dp-fedsam.no-such-key": 3, "dp-fedavg.clip-norm": 2.5}
    assert Run.of({**DEFAULTS, "method": "dp-fedavg", **tables}).own.clip_norm == 2.5
    assert refused({"method": "nbafl", **tables})[0].startswith("nbafl.epsilon=-7.0")
    assert refused({"method": "dp-fedavg", **tables}, given=("nbafl.epsilon",)) == [
        "nbafl.epsilon=-7.0: is not read by method='dp-fedavg'; set method=nbafl with it"
    ]


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam", "fed-smp"])
def test_a_target_that_no_round_meets_is_refused_and_one_that_a_round_meets_is_not(method):
    (line,) = refused({"method": method, f"{method}.target-epsilon": 0.01})
    assert line.startswith(f"{method}.target-epsilon=0.01: one round alone costs epsilon=1.0")
    accept({"method": method, f"{method}.target-epsilon": 1.1})


def test_settings_of_own_models_are_all_named_in_an_app_around_another_model():
    lines = refused({"model": "cnn", "partition": "x", "foo": 3, "momentum": 2.0}, built=True)
    assert [line.partition("=")[0] for line in lines] == ["model", "partition", "foo", "momentum"]
    accept({"num-clients": 200, "learning-rate": 0.2}, built=True)


def test_missing_data_is_told_without_reading_any():
    assert "needs its four idx files" in refused({"task": "fashion-mnist"})[0]
    assert refused({"data-dir": "/nowhere/NEEDED"})[0].startswith("data-dir: this preset needs the full MNIST")
    accept({"task": "fashion-mnist", "data-dir": "torchvision:/nowhere"})


def test_a_preset_combines_with_another_method():
    preset = {**PRESETS["mnist-fedsgd-dpc-laplace"], "batch-size": 3}
    found = with_method(preset, "dp-fedavg")
    kept = ("model-bias", "num-clients", "partition", "classes-per-client", "num-rounds", "sampling", "cohort-size", "batch-size")
    assert found == {key: preset[key] for key in kept} | {"method": "dp-fedavg"}
    assert with_method(PRESETS["fashion-mnist-dp-fedsam"], "nbafl").keys() >= {"task", "data-dir", "partition", "batch-size"}
    assert not {"sampling", "sampling-rate", "learning-rate"} & with_method(PRESETS["fashion-mnist-dp-fedsam"], "nbafl").keys()
    other = with_method({**PRESETS["fashion-mnist-dp-fedsam"], "dp-fedavg.clip-norm": 3.0}, "dp-fedavg")
    assert (other["sampling"], other["sampling-rate"], other["learning-rate"]) == ("poisson", 0.1, 0.05)
    assert [key for key in other if "." in key] == ["dp-fedavg.clip-norm"]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_runs_with_what_it_needs(task):
    config = {"task": task, **module_of(task).NEEDS}
    if "data-dir" in config:
        assert "data-dir" in refused(config)[0]
        config["data-dir"] = str(ROOT)
    accept({**config, "method": "nbafl"})


def test_models_are_called_as_their_kinds():
    assert tuple(_KINDS) == MODELS


def test_what_the_check_refuses_the_run_would_refuse():
    """The strategy's own word on the first round."""
    rules = Run.of({**DEFAULTS, "method": "dp-fedavg", "dp-fedavg.target-epsilon": 0.9}).strategy(dict).rules
    assert rules.why_stop(RunState(), 1, None) == "it would pass target_epsilon=0.9"
    refused({"method": "dp-fedavg", "dp-fedavg.target-epsilon": 0.9})


def test_a_comparison_reads_the_default_sampling_as_the_methods_own():
    of = {
        method: unread({**DEFAULTS, "method": method}) & {"sampling-rate", "cohort-size"}
        for method in ("dp-fedavg", "fedsgd-dpc")
    }
    assert of == {"dp-fedavg": {"cohort-size"}, "fedsgd-dpc": {"sampling-rate"}}
