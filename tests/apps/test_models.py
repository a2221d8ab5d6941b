import math

import pytest
import torch

from flower_dp.apps.tasks import models

SHAPES = {"resnet18": (3, 32, 32)}


def made(name: str, **arguments) -> torch.nn.Module:
    num_features = math.prod(SHAPES.get(name, (28, 28)))
    return models.make(name, num_classes=2 if name == "linear-svm" else 10, num_features=num_features, **arguments)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "bias", "expected"),
    [
        ("logistic", True, 784 * 10 + 10),
        ("mlp", True, 203_530),
        # As McMahan et al. 2017 state for their CNN, and Papernot et al. 2021 for theirs.
        ("cnn", True, 1_663_370),
        ("cnn", False, 1_663_370 - 32 - 64 - 512 - 10),
        ("cnn-small", True, 26_010),
        ("linear-svm", True, 785),
    ],
)
def test_parameter_count(name, bias, expected):
    assert count(made(name, bias=bias, seed=0)) == expected


@pytest.mark.parametrize("name", models.MODELS)
def test_both_input_shapes_give_the_same_logits(name):
    model = made(name, seed=3)
    images = torch.rand(5, *SHAPES.get(name, (1, 28, 28)), generator=torch.Generator().manual_seed(0))
    logits = model(images)
    assert logits.shape == (5, 1 if name == "linear-svm" else 10)
    torch.testing.assert_close(model(images.reshape(5, -1)), logits)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_decides_and_nothing_else(name):
    """The generators are as before, and no model has a buffer."""
    before, seed = torch.random.get_rng_state(), torch.initial_seed()
    model = made(name, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.initial_seed() == seed
    assert list(model.buffers()) == []
    first = model.state_dict()
    torch.rand(3)  # whatever else draws from the global generator
    again = made(name, seed=7).state_dict()
    other = made(name, seed=8).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [
        key for key in first if not key.startswith("resnet.") or ".conv" in key or ".fc." in key
    ]  # not normalization's 1 and 0
    assert drawn
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_bad_input():
    with pytest.raises(ValueError, match="model='resnet': must be one of logistic, mlp, cnn"):
        models.make("resnet", seed=0)
    with pytest.raises(ValueError, match="seed=-1: must be a whole number >= 0"):
        models.make("mlp", seed=-1)
    with pytest.raises(ValueError, match="model='cnn': needs 28 x 28 pixels, not 30 features"):
        models.make("cnn", seed=0, num_features=30)
    with pytest.raises(ValueError, match="model='linear-svm': needs two classes, not 10"):
        models.make("linear-svm", seed=0)
