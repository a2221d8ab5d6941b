"""Records: bad data is refused when it is given, not rounds later."""

import pytest
import torch

from flower_dp.clients import TensorRecords, as_records

INPUTS, TARGETS = torch.arange(12.0).reshape(4, 3), torch.arange(4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"inputs": INPUTS.numpy()}, "inputs: is a ndarray"),
        ({"targets": [0, 1, 2, 3]}, "targets: is a list"),
        ({"targets": TARGETS[:3]}, r"shapes \(4, 3\) and \(3,\)"),
        ({"targets": torch.tensor(1)}, r"shapes \(4, 3\) and \(\)"),
        ({"inputs": {}}, "inputs: has no tensor"),
        ({"inputs": {"a": INPUTS, "b": INPUTS[:3]}}, r"inputs\['b'\], targets: shapes \(3, 3\)"),
        ({"indices": torch.arange(2.0)}, "indices: torch.float32"),
        ({"indices": torch.tensor([[0]])}, r"indices: .* of shape \(1, 1\)"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_given(arguments, named):
    with pytest.raises(ValueError, match=named):
        TensorRecords(**{"inputs": INPUTS, "targets": TARGETS} | arguments)


def test_batches_are_the_rows_of_this_client():
    records = TensorRecords(inputs=INPUTS, targets=TARGETS, indices=torch.tensor([3, 1]), transform=lambda batch: 2 * batch)
    assert len(records) == 2
    inputs, targets = records.batch(torch.tensor([1]), torch.device("cpu"))
    assert (inputs.tolist(), targets.tolist()) == ([[6.0, 8.0, 10.0]], [1])
    assert len(TensorRecords(inputs=INPUTS, targets=TARGETS)) == 4


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS.numpy(), TARGETS.numpy()),
        (INPUTS, TARGETS),
        torch.utils.data.TensorDataset(INPUTS, TARGETS),
        list(zip(INPUTS, TARGETS.tolist(), strict=True)),
        TensorRecords(inputs=INPUTS, targets=TARGETS),
    ],
    ids=["arrays", "tensors", "dataset", "list", "records"],
)
def test_a_clients_data_may_come_in_several_kinds(data):
    records = as_records(data)
    assert len(records) == 4
    inputs, targets = records.batch(torch.tensor([2, 0]), torch.device("cpu"))
    assert torch.equal(inputs, INPUTS[[2, 0]])
    assert (targets.tolist(), targets.dtype) == ([2, 0], torch.int64)


@pytest.mark.parametrize("data", [INPUTS.sum(), 7, "text", (INPUTS,), {"inputs": INPUTS}, None])
def test_what_is_no_data_is_refused(data):
    if isinstance(data, torch.Tensor):
        data = (data, TARGETS)
    with pytest.raises(ValueError, match=r"inputs|a client's data is a"):
        as_records(data)


def test_a_data_set_of_something_else_is_refused():
    with pytest.raises(ValueError, match="must be pairs"):
        as_records([{"pixels": INPUTS[0]}]).batch(torch.tensor([0]), torch.device("cpu"))
