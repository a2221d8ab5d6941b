"""Checked cross-entropy against torch's, and against torch's on the targets that count."""

import pytest
import torch
from torch import nn

from flower_dp.clients.training.losses import cross_entropy, hinge, record_cross_entropy


def _value_and_gradient(loss, outputs, targets):
    outputs = outputs.clone().requires_grad_()
    value = loss(outputs, targets)
    (gradient,) = torch.autograd.grad(value, outputs)
    return value.detach(), gradient


def _targets(*shape):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "targets",
    [_targets(9), _targets(9, 4, 4), _targets(9).where(torch.arange(9) % 3 > 0, -100), torch.full((9, 5), 0.2)],
    ids=["classes", "a class for every pixel", "ignored", "probabilities"],
)
def test_is_torchs_to_the_bit_where_torch_has_one(targets):
    shape = (9, 5, *targets.shape[1:]) if targets.dtype == torch.int64 else (9, 5)
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    value, gradient = _value_and_gradient(cross_entropy, outputs, targets)
    expected, expected_gradient = _value_and_gradient(nn.functional.cross_entropy, outputs, targets)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("label", [5, 2**40, -1, -101, -(2**40)])
def test_a_target_that_is_no_class_counts_as_if_ignored(label):
    outputs, targets = torch.randn(9, 5, generator=torch.Generator().manual_seed(2)), _targets(9)
    targets[4] = label
    value, gradient = _value_and_gradient(cross_entropy, outputs, targets)
    kept = torch.arange(9) != 4
    expected, expected_gradient = _value_and_gradient(nn.functional.cross_entropy, outputs[kept], targets[kept])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[kept], expected_gradient)
    assert not gradient[4].any()
    value, gradient = _value_and_gradient(cross_entropy, outputs, torch.full((9,), label))
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("label", [5, -1, 2**40])
def test_a_record_with_an_unknown_class_has_no_loss_and_no_gradient(label):
    targets = torch.tensor([[0, 1, label, 2]])
    value, gradient = _value_and_gradient(record_cross_entropy, torch.randn(1, 5, 4), targets)
    assert value.isnan()
    assert not gradient.any()


@pytest.mark.parametrize("targets", [torch.tensor([3]), _targets(1, 4, 4), torch.tensor([[0, -100, 4, 2]])])
def test_a_record_has_torchs_loss_and_gradient(targets):
    """It may ignore some targets."""
    outputs = torch.randn(1, 5, *targets.shape[1:])
    value, gradient = _value_and_gradient(record_cross_entropy, outputs, targets)
    expected, expected_gradient = _value_and_gradient(nn.functional.cross_entropy, outputs, targets)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("no_label", [0, 2**40])
def test_hinge_by_hand(no_label):
    """At its kink its gradient is zero, and so it is for a target that is no label."""
    outputs = torch.tensor([[2.0], [0.25], [-0.5], [3.0], [1.0], [0.5]])
    value, gradient = _value_and_gradient(hinge, outputs, torch.tensor([1, 1, 1, -1, 1, no_label]))
    assert value == (0 + 0.75 + 1.5 + 4) / 6
    torch.testing.assert_close(gradient.flatten(), torch.tensor([0.0, -1, -1, 1, 0, 0]) / 6)
