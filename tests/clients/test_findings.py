"""What made-up records have said of a model counts for those that are alike, and for no other."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flower_dp.clients import FlatModel, TensorRecords
from flower_dp.clients.training import findings, record_clipping
from flower_dp.clients.training.dry_run import of_records
from flower_dp.clients.training.findings import Findings, findings_of

OUTPUTS = 2


def stack(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), *(middle or (nn.ReLU(),)), nn.Flatten(), nn.Linear(12, OUTPUTS))


def known(model: nn.Module) -> Findings:
    return findings_of(FlatModel(model))


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    findings._shared.cache_clear()


class Own(nn.ReLU):
    """Might do anything."""


class Weights(nn.Parameter):
    """Might do anything as well."""


def changed(change: Callable[[Any], object]) -> nn.Module:
    model = stack()
    change(model)
    return model


def test_models_that_differ_in_their_weights_alone_are_alike() -> None:
    found = known(stack())
    assert known(stack()) is found
    assert known(copy.deepcopy(stack())) is found


@pytest.mark.parametrize(
    "other",
    [
        lambda: stack(nn.Tanh()),
        lambda: changed(lambda model: model[0].weight.requires_grad_(False)),
        lambda: changed(lambda model: setattr(model[1], "note", 3)),
        lambda: stack().eval(),
    ],
    ids=["layer", "frozen", "option", "evaluates"],
)
def test_other_layers_and_options_are_another_model(other: Callable[[], nn.Module]) -> None:
    assert known(other()) is not known(stack())
    assert known(other()) is known(other())


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack(Own()),
        lambda: stack(nn.Dropout(0.5)),
        lambda: changed(lambda model: setattr(model[1], "forward", lambda inputs: inputs)),
        lambda: changed(lambda model: model[1].register_forward_hook(lambda *_: None)),
        lambda: changed(lambda model: setattr(model[1], "note", [1])),
        lambda: changed(lambda model: setattr(model[0], "weight", Weights(model[0].weight.detach()))),
        lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
    ],
    ids=["subclass", "draws", "forward", "hook", "list", "parameter", "layer twice"],
)
def test_a_model_of_which_more_is_to_be_known_stands_alone(make: Callable[[], nn.Module]) -> None:
    assert known(make()) is not known(make())


def test_a_hook_for_all_modules_counts() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert known(stack()) is not known(stack())
    finally:
        handle.remove()


def test_the_next_clients_model_is_not_examined_again_and_another_loss_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    gradients = record_clipping.record_gradients
    monkeypatch.setattr(record_clipping, "record_gradients", lambda *a, **k: calls.append(1) or gradients(*a, **k))
    records = TensorRecords(inputs=torch.zeros(5, 1, 4), targets=torch.zeros(5, dtype=torch.int64))

    def examined(loss: Any = nn.functional.cross_entropy, records: TensorRecords = records) -> int:
        before = len(calls)
        assert of_records(FlatModel(stack()), records, loss) is None
        return len(calls) - before

    assert examined() > 0
    assert examined() == 0
    assert examined(lambda outputs, targets: outputs.square().mean()) > 0
    assert examined(records=TensorRecords(inputs=torch.zeros(5, 1, 4), targets=torch.zeros(5, OUTPUTS))) > 0
    assert examined() == 0


def test_a_copy_knows_nothing_and_no_more_than_so_many_questions_are_kept() -> None:
    model = FlatModel(stack(Own()))
    findings_of(model)["asked"] = True
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert "asked" not in findings_of(again)
    assert "asked" in findings_of(model)
    for number in range(2 * findings._MOST_FINDINGS):
        findings_of(model)[number] = True
    assert len(findings_of(model)) <= findings._MOST_FINDINGS
    assert 2 * findings._MOST_FINDINGS - 1 in findings_of(model)
