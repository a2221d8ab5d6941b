import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )


def load_data(partition):
    rng = torch.Generator().manual_seed(partition)
    return torch.randn(12, 1, 6, 6, generator=rng), torch.randint(0, 2, (12,), generator=rng)
