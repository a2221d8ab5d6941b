import pytest
import torch
from torch import nn

from flower_dp.clients import FlatModel, fix_batchnorm, refusal_messages


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), self.norm, nn.ReLU(), nn.BatchNorm2d(6, affine=False))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 3))

    def forward(self, images):
        return self.head(images + self.norm(self.body(images)))


def test_a_model_with_batchnorm_is_refused_and_its_copy_is_not():
    model = Residual().double().eval()
    model.norm.bias.requires_grad_(False)
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    with pytest.raises(ValueError, match="fix_batchnorm"):
        FlatModel(model)
    fixed = fix_batchnorm(model)
    assert isinstance(model.norm, nn.BatchNorm2d)  # the original stays
    layers = [layer for layer in fixed.modules() if isinstance(layer, nn.GroupNorm)]
    assert [layer.num_groups for layer in layers] == [2, 2, 1]
    assert [layer.affine for layer in layers] == [True, False, True]
    assert fixed.norm is fixed.body[1]  # one layer in two places stays one
    assert torch.equal(fixed.norm.weight, model.norm.weight)  # of the same type
    assert (fixed.norm.weight.requires_grad, fixed.norm.bias.requires_grad, fixed.norm.training) == (True, False, False)
    assert not any("running" in name for name in fixed.state_dict())
    FlatModel(fixed)


def test_groups_by_hand():
    assert fix_batchnorm(nn.BatchNorm2d(12), num_groups=3).num_groups == 3
    with pytest.raises(ValueError, match="num_groups=5: must divide the 12 channels of layer '0'"):
        fix_batchnorm(nn.Sequential(nn.BatchNorm2d(12)), num_groups=5)

    class Own(nn.BatchNorm2d): ...

    with pytest.raises(ValueError, match="no replacement for Own"):
        fix_batchnorm(nn.Sequential(Own(4)))


class FrozenBatchNorm2d(nn.Module):
    """As that of torchvision: constants in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))


@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        (nn.BatchNorm2d(4), "GroupNorm.num_groups, 4. or flower_dp.clients.fix_batchnorm"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
        (FrozenBatchNorm2d(), "scale and shift alone"),
    ],
)
def test_fix_batchnorm_is_advised_where_it_helps(layer, advice):
    with pytest.raises(ValueError, match=advice) as raised:
        FlatModel(nn.Sequential(layer))
    fixed = fix_batchnorm(nn.Sequential(layer))
    helps = not hasattr(fixed[0], "running_mean")
    assert ("fix_batchnorm" in str(raised.value)) == helps


def test_a_batchnorm_of_one_number_is_not_made_zero():
    """GroupNorm(1, 1) of vectors gives its shift, whatever the input: nothing before it could be trained."""
    assert not nn.GroupNorm(1, 1, affine=False)(torch.randn(5, 1)).any()
    with pytest.raises(ValueError, match=r"layer '1': normalizes one number a record.*leave the layer out"):
        fix_batchnorm(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    assert fix_batchnorm(nn.BatchNorm1d(1), num_groups=1)(torch.randn(5, 1, 9)).abs().max() > 0.1
    assert fix_batchnorm(nn.BatchNorm2d(1))(torch.randn(5, 1, 3, 3)).abs().max() > 0.1


@pytest.mark.parametrize("inner", [False, True], ids=["the wrapper", "the model inside, with hooks"])
def test_a_model_that_opacus_wraps_is_refused_with_what_to_do(inner):
    """Its hooks leave the gradients of a client's records on the parameters."""
    from opacus import GradSampleModule  # half a second

    model = nn.Sequential(nn.Linear(3, 2))
    wrapped = GradSampleModule(model)
    with pytest.raises(ValueError, match=r"wrapped by opacus.*to_standard_module") as raised:
        FlatModel(model if inner else wrapped)
    assert refusal_messages.client_fn_refusal(raised.value) == f"client_fn failed: {refusal_messages.OPACUS}"
    FlatModel(wrapped.to_standard_module())
