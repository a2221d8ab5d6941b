"""Records: bad data is refused when it is given, not rounds later."""

import pytest
import torch

from flower_dp.clients import TensorRecords, as_records

INPUTS, TARGETS = torch.arange(12.0).reshape(4, 3), torch.arange(4)
ROWS = torch.tensor([3, 2, 1, 0])


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


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS.numpy(), TARGETS.numpy()),
        (INPUTS, TARGETS),
        torch.utils.data.TensorDataset(INPUTS, TARGETS),
        list(zip(INPUTS, TARGETS.tolist(), strict=True)),
        TensorRecords(inputs=INPUTS.flip(0) / 2, targets=TARGETS.flip(0), indices=ROWS, transform=lambda batch: 2 * batch),
    ],
    ids=["arrays", "tensors", "dataset", "list", "records"],
)
def test_a_clients_data_may_come_in_several_kinds(data):
    records = as_records(data)
    assert len(records) == 4
    inputs, targets = records.batch(torch.tensor([2, 0]), torch.device("cpu"))
    assert torch.equal(inputs, INPUTS[[2, 0]])
    assert (targets.tolist(), targets.dtype) == ([2, 0], torch.int64)


@pytest.mark.parametrize("data", [(INPUTS.sum(), TARGETS), 7, "text", (INPUTS,), {"inputs": INPUTS}, None])
def test_what_is_no_data_is_refused(data):
    with pytest.raises(ValueError, match=r"inputs|a client's data is a"):
        as_records(data)
    with pytest.raises(ValueError, match="must be pairs"):
        as_records([{"pixels": INPUTS[0]}]).batch(torch.tensor([0]), torch.device("cpu"))
