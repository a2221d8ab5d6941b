"""Convolutions train with channels last where that is the same function; models, losses and shapes decide, never data."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_dp.apps.tasks.models import make
from flower_dp.clients import FlatModel, TensorRecords, Training, local_updates
from flower_dp.clients.training.channels_last import Convolutions
from tests.clients.test_engines import _drawn, _images

RECIPE = Training(learning_rate=0.1, batch_size=4, num_local_epochs=2, momentum=0.5, sam_radius=0.05)


class Net(nn.Module):
    """Two convolutions and a forward of one's own, which notes the layouts of the first one's outputs."""

    def __init__(self, *, view: bool = False, dropout: bool = False, counts: bool = False) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8 * 4 * 4, 5)
        self.view, self.dropout, self.counts, self.passes, self.layouts = view, dropout, counts, 0, Layouts()

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        hidden = torch.relu(self.first(inputs))
        self.layouts.seen.append(hidden.is_contiguous(memory_format=torch.channels_last))
        hidden = nn.functional.dropout(hidden) if self.dropout else hidden
        hidden = self.second(hidden) * (self.passes if self.counts else 1)
        return self.last(hidden.view(len(hidden), -1) if self.view else hidden.flatten(1))


class Layouts:
    """Whether outputs were made with channels last, by forward pass."""

    def __init__(self) -> None:
        self.seen: list[bool] = []


def rows_of(model: FlatModel, clients: list[Any], seeds: list[int]) -> list[Any]:
    start = torch.randn(model.layout.size, generator=torch.Generator().manual_seed(1)) / 10
    return list(local_updates(start, clients, RECIPE, model=model, server_round=1, seeds=seeds))


def usual_row(module: nn.Module, client: TensorRecords, seed: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The row in torch's own layout."""
    with monkeypatch.context() as patch:
        patch.setattr(Convolutions, "suit", lambda *_, **__: False)
        (row,) = rows_of(FlatModel(module), [client], [seed])
    return row  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["own forward", "cnn-small"])
def test_channels_last_is_the_same_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch is smaller; with one channel both layouts have the same order, but not the same strides."""
    build = partial(make, "cnn-small", seed=0) if name == "cnn-small" else Net
    model, client = FlatModel(build()), (_drawn(784, classes=5) if name == "cnn-small" else _images)(10, 2)
    vector, layout = model.vector.clone(), model.layout
    turned: list[bool] = []
    convolution = next(layer for layer in model.module.modules() if isinstance(layer, nn.Conv2d))
    convolution.register_forward_hook(lambda _, inputs, outputs: turned.append(outputs.stride()[1] == 1))
    (row,) = rows_of(model, [client], [7])
    usual = usual_row(build(), client, 7, monkeypatch)
    torch.testing.assert_close(row, usual, atol=1e-5, rtol=1e-4)
    assert usual.norm() > 1e-2
    assert len(turned) == 2 + 12  # the trial in both layouts, then 6 steps of two passes each
    assert turned.count(False) == 1
    assert model.layout == layout
    assert all(one.is_contiguous() for one in model.parameters)
    assert not any(layer._forward_pre_hooks for layer in model.module.modules())
    model.vector.copy_(vector)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters), vector)


@pytest.mark.parametrize("options", [{"view": True}, {"dropout": True}], ids=["view", "dropout"])
def test_a_model_that_is_another_function_keeps_its_layout(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """`view` fails with channels last; dropout would drop other units."""
    module, client = Net(**options), _images(10, 2)
    (row,) = rows_of(FlatModel(module), [client], [7])
    assert torch.equal(row, usual_row(Net(**options), client, 7, monkeypatch))
    assert not any(module.layouts.seen[2:])  # after the trial


def test_no_other_client_changes_a_bit() -> None:
    """The trial is made once: a client that comes after it has the row that it has alone, with all that the model keeps."""
    own, other = _images(10, 2), _images(6, 3)
    for options in ({"counts": True}, {"dropout": True, "view": True}):
        (alone,) = rows_of(FlatModel(Net(**options)), [own], [7])
        first, _ = rows_of(FlatModel(Net(**options)), [own, other], [7, 8])
        _, last = rows_of(FlatModel(Net(**options)), [other, own], [8, 7])
        assert torch.equal(first, alone)
        assert torch.equal(last, alone)


def test_no_value_of_a_record_chooses_the_layout() -> None:
    model = FlatModel(Net())
    broken = TensorRecords(inputs=_images(10, 2).inputs * torch.nan, targets=torch.full((10,), 77))
    _, row = rows_of(model, [broken, _images(10, 2)], [6, 7])
    (alone,) = rows_of(FlatModel(Net()), [_images(10, 2)], [7])
    assert torch.equal(row, alone)
    assert model.module.layouts.seen[1:] == [True] * (len(model.module.layouts.seen) - 1)


def test_where_nothing_is_to_be_chosen() -> None:
    """A device that is no processor, a model without convolutions, and inputs by name."""
    batch = _images(10, 1).inputs, _images(10, 1).targets
    assert Convolutions(Net(), torch.device("cuda")).kind_of(*batch) is None
    assert Convolutions(nn.Conv1d(3, 1, 1), torch.device("cpu")).kind_of(*batch) is None
    assert Convolutions(Net(), torch.device("cpu")).kind_of({"pixels": batch[0]}, batch[1]) is None
    assert Convolutions(Net(), torch.device("cpu")).kind_of(*batch) is not None
