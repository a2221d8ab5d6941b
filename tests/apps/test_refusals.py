"""What the app refuses before a run, and what of a run-config nothing reads."""

from pathlib import Path

import pytest

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.refusals import check
from flower_dp.apps.settings import SAMPLINGS
from flower_dp.apps.strategy_arguments import sampler_of
from flower_dp.apps.tasks import TASKS, module_of
from flower_dp.apps.unread_settings import unread
from flower_dp.core.checks import SettingsError
from flower_dp.methods import METHODS
from tests.app_runs import DEFAULTS, PRESETS


def refused(config, *, given=(), built=False):
    with pytest.raises(SettingsError) as error:
        check(config, defaults=DEFAULTS, given=given, built=built)
    return str(error.value).splitlines()


def accept(config, *, built=False):
    check(config, defaults=DEFAULTS, given=(), built=built)


def test_all_problems_are_told_at_once():
    config = {"method": "fedsgd-dpc", "sampling": "poisson", "sampling-rate": 0.2, "batch-size": 8, "momentum": 0.0}
    lines = refused({**config, "fedsgd-dpc.clip-norm": -1.0, "fedsgd-dpc.mechanism": "none", "local-epochs": "two"})
    keys = ["batch-size", "fedsgd-dpc.clip-norm", "fedsgd-dpc.mechanism", "local-epochs", "sampling", "sampling-rate"]
    assert sorted(line.partition(":")[0].partition("=")[0] for line in lines) == keys


def test_an_argument_of_another_name_is_told_by_its_setting():
    """By the error's field: it was told as `sampling-rate`, which is another setting."""
    (line,) = refused({"method": "fedsgd-dpc", "fedsgd-dpc.record-sampling-rate": 0.5})
    assert line.startswith("fedsgd-dpc.record-sampling-rate=0.5: must be 1 for mechanism='laplace'")


def test_what_follows_from_a_refused_setting_is_no_news():
    lines = refused({"blur-strength": -1.0, "blur-bound": 0.5})
    assert lines == ["blur-strength=-1.0: must be a finite number >= 0"]
    assert [line.partition("=")[0] for line in refused({"task": "foo", "model": "bar"})] == ["model", "task"]
    assert len(refused({"num-clients": -1, "method": "dp-pasgd", "dp-pasgd.client-epsilons": "1,2"})) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_its_samplings_and_no_others(method):
    samplings = METHODS[method].samplings
    assert ParsedRunConfig.of({**DEFAULTS, "method": method}).settings.sampling == samplings[0]
    for sampling in SAMPLINGS:
        config = {**DEFAULTS, "method": method, "sampling": sampling, "cohort-size": 0 if sampling in ("full", "poisson") else 10}
        if sampling in samplings:
            assert sampler_of(ParsedRunConfig.of(config).settings)
        else:
            with pytest.raises(SettingsError, match=f"sampling='{sampling}': must be (one of )?{', '.join(samplings)}"):
                ParsedRunConfig.of(config)


def test_the_chosen_methods_table_alone_counts():
    tables = {"nbafl.epsilon": -7.0, "dp-fedsam.no-such-key": 3, "dp-fedavg.clip-norm": 2.5}
    assert ParsedRunConfig.of({**DEFAULTS, "method": "dp-fedavg", **tables}).own.clip_norm == 2.5
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


@pytest.mark.parametrize("task", TASKS)
def test_a_task_runs_with_what_it_needs(task):
    config = {"task": task, **module_of(task).NEEDS}
    if "data-dir" in config:
        assert "data-dir" in refused(config)[0]
        config["data-dir"] = str(Path(__file__).parent)
    accept({**config, "method": "nbafl"})


# What nothing reads


@pytest.mark.parametrize("preset", PRESETS)
def test_all_that_a_preset_sets_is_read(preset):
    config = DEFAULTS | PRESETS[preset]
    assert [key for key in unread(config) if config[key] != DEFAULTS[key]] == []


def test_what_another_method_sampling_or_partition_reads_is_not_read():
    config = DEFAULTS | {"method": "fedsgd-dpc", "sampling": "round-robin", "partition": "dirichlet"}
    ignored = unread(config)
    assert {"momentum", "training-engine", "nbafl.epsilon", "adult.features", "sampling-rate", "classes-per-client"} < ignored
    assert {"private-evaluation.noise-multiplier", "blur-bound"} < ignored
    read = {"fedsgd-dpc.epsilon", "learning-rate", "cohort-size", "dirichlet-alpha", "private-evaluation.every", "seed"}
    assert not read & ignored
    assert "private-evaluation.metrics" not in unread(config | {"private-evaluation.every": 2})
    assert "dp-fedavg.clip-learning-rate" in unread(config | {"method": "dp-fedavg"})
    assert "dp-fedavg.clip-learning-rate" not in unread(config | {"method": "dp-fedavg", "dp-fedavg.clip-quantile": 0.5})


def test_an_apps_own_settings_count_as_read():
    assert unread({"method": "mine", "momentum": 0.5, "nbafl.epsilon": 2.0}) == set()
    assert unread({"method": "nbafl", "my-key": 1, "my.table": 2}).isdisjoint({"my-key", "my.table"})
