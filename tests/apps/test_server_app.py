"""What the app's server says of a model that has learned nothing."""

import pytest
import torch
from flwr.app import MetricRecord

from flower_dp.apps.server_app import _warn_of_one_class
from flower_dp.clients import TensorRecords

# 750 of 1,000 records have the class 0.
RECORDS = TensorRecords(inputs=torch.zeros(1000, 2), targets=(torch.arange(1000) >= 750).long())


@pytest.mark.parametrize(
    ("accuracies", "warned"),
    [([0.99, 0.75], True), ([0.2, 0.7, 0.8, 0.75], False), ([0.75], False), ([], False)],
)
def test_a_model_that_is_no_better_than_its_largest_class_is_warned_of(accuracies, warned, caplog):
    """The initial model, round 0, has learned nothing anyway; one round that is better is enough."""
    _warn_of_one_class({number: MetricRecord({"accuracy": one}) for number, one in enumerate(accuracies)}, RECORDS)
    assert ("The model learned nothing: its accuracy was at most" in caplog.text) == warned
    assert not warned or "75.0 % of the test records" in caplog.text
