"""What the app's server says of a model that has learnt nothing."""

import pytest
import torch
from flwr.app import MetricRecord

from flower_dp.apps.server_app import _warn_of_one_class
from flower_dp.clients import TensorRecords
from tests.app_runs import play

# 750 of 1,000 records have the class 0.
RECORDS = TensorRecords(inputs=torch.zeros(1000, 2), targets=(torch.arange(1000) >= 750).long())


@pytest.mark.parametrize(
    ("accuracies", "warned"),
    [([0.99, 0.75], True), ([0.2, 0.7, 0.8, 0.75], False), ([0.75], False), ([], False)],
)
def test_a_model_that_is_no_better_than_its_largest_class_is_warned_of(accuracies, warned, caplog):
    """The initial model, round 0, has learnt nothing anyway; one round that is better is enough."""
    _warn_of_one_class({number: MetricRecord({"accuracy": one}) for number, one in enumerate(accuracies)}, RECORDS)
    assert ("the model has learnt nothing: its accuracy was at most" in caplog.text) == warned
    assert not warned or "75.0 % of the records" in caplog.text


def test_a_run_warns_of_it(tmp_path, caplog):
    settings = {"task": "breast-cancer", "method": "dp-fedavg", "num-clients": 10, "num-rounds": 1, "sampling": "full"}
    settings |= {"dp-fedavg.noise-multiplier": 0.0, "dp-fedavg.target-epsilon": 0.0, "dp-fedavg.delta": 1e-3}
    play(tmp_path / "run", {**settings, "learning-rate": 1e-9})
    assert "the model has learnt nothing" in caplog.text
