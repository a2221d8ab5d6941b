import pytest
import torch
from torch import nn

from flower_dp.clients import FlatModel, fix_batchnorm


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), self.norm, nn.ReLU(), nn.BatchNorm2d(6, affine=False))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 3))

    def forward(self, images):
        return self.head(images + self.norm(self.body(images)))


def test_a_model_with_batchnorm_is_refused_and_its_copy_is_not():
    model = Residual().double()
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    with pytest.raises(ValueError, match="fix_batchnorm"):
        FlatModel(model)
    fixed = fix_batchnorm(model)
    assert isinstance(model.norm, nn.BatchNorm2d)  # the original stays
    layers = [layer for layer in fixed.modules() if isinstance(layer, nn.GroupNorm)]
    assert [(layer.num_groups, layer.num_channels, layer.affine) for layer in layers] == [
        (2, 6, True),
        (2, 6, False),
        (1, 32, True),
    ]
    assert fixed.norm is fixed.body[1]  # one layer in two places stays one
    assert fixed.norm.weight.dtype == torch.float64
    assert (fixed.norm.weight == 3).all()
    assert not any("running" in name for name in fixed.state_dict())
    FlatModel(fixed)


def test_no_output_of_a_replacement_is_always_zero():
    # One channel a group, on vectors or images of one pixel, would normalise every value to zero.
    for layer, shape in (
        (nn.BatchNorm1d(32), (5, 32)),
        (nn.BatchNorm2d(32), (5, 32, 1, 1)),
        (nn.BatchNorm3d(16), (5, 16, 1, 1, 1)),
    ):
        assert (fix_batchnorm(layer)(torch.randn(*shape)).abs() > 1e-3).float().mean() > 0.5


def test_records_no_longer_mix():
    fixed = fix_batchnorm(Residual()).train()
    images = torch.randn(4, 6, 5, 5)
    alone, together = fixed(images[:1]), fixed(images)
    assert torch.allclose(alone, together[:1], atol=1e-5)


def test_groups_by_hand():
    assert fix_batchnorm(nn.BatchNorm2d(12), num_groups=3).num_groups == 3
    with pytest.raises(ValueError, match="num_groups=5: must divide the 12 channels of layer '0'"):
        fix_batchnorm(nn.Sequential(nn.BatchNorm2d(12)), num_groups=5)

    class Own(nn.BatchNorm2d): ...

    with pytest.raises(ValueError, match="no replacement for Own"):
        fix_batchnorm(nn.Sequential(Own(4)))


def test_frozen_layers_stay_frozen_and_modes_stay():
    model = nn.Sequential(nn.BatchNorm2d(8)).eval()
    model[0].weight.requires_grad_(False)
    fixed = fix_batchnorm(model)
    assert (fixed[0].weight.requires_grad, fixed[0].bias.requires_grad, fixed[0].training) == (False, True, False)
