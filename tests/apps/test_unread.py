"""What a run-config has that nothing reads: nothing that somebody has set."""

import pytest

from flower_dp.apps.unread import unread
from tests.app_runs import DEFAULTS, PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_all_that_a_preset_sets_is_read(preset):
    config = DEFAULTS | PRESETS[preset]
    ignored = unread(config)
    assert ignored <= DEFAULTS.keys()
    assert {key: config[key] for key in ignored} == {key: DEFAULTS[key] for key in ignored}


def test_what_another_method_sampling_or_partition_reads_is_not_read():
    config = DEFAULTS | {"method": "fedsgd-dpc", "sampling": "round-robin", "partition": "dirichlet"}
    ignored = unread(config)
    assert {"momentum", "engine", "nbafl.epsilon", "adult.features", "sampling-rate", "classes-per-client"} < ignored
    assert {"evaluation.noise-multiplier", "blur-bound"} < ignored
    read = {"fedsgd-dpc.epsilon", "learning-rate", "cohort-size", "dirichlet-alpha", "evaluation.every", "seed"}
    assert not read & ignored
    assert "evaluation.metrics" not in unread(config | {"evaluation.every": 2})
    assert "dp-fedavg.clip-learning-rate" in unread(config | {"method": "dp-fedavg"})
    assert "dp-fedavg.clip-learning-rate" not in unread(config | {"method": "dp-fedavg", "dp-fedavg.clip-quantile": 0.5})


def test_an_apps_own_settings_count_as_read():
    assert unread({"method": "mine", "momentum": 0.5, "nbafl.epsilon": 2.0}) == set()
    assert unread({"method": "nbafl", "my-key": 1, "my.table": 2}).isdisjoint({"my-key", "my.table"})
