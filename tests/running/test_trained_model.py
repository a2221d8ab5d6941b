"""RunFolder.load_model_into: what is replaced, what stays, and what does not fit."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from flower_dp import RunFolder
from flower_dp.clients import model_arrays
from flower_dp.running.trained_model import rest_of


class Tied(nn.Module):
    """Tied weights and a buffer, as a small GPT."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))


class LoRA(nn.Module):
    def __init__(self, seed=1):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.base = nn.Linear(4, 4).requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)


WEIGHT = np.zeros((2, 3), np.float32)


def shifted(model):
    """What a run has made of a model's trainable arrays."""
    return {name: array.numpy() + np.float32(1) for name, array in model_arrays(model).items()}


def folder_of(tmp_path, arrays, others=None):
    folder = RunFolder.create(tmp_path / "run", {}, "run")
    folder.write_results(arrays, others)
    return RunFolder(str(tmp_path / "run"))


def test_buffers_stay_and_tied_weights_are_one(tmp_path):
    trained = shifted(Tied())
    assert set(trained) == {"embed.weight", "norm.weight", "norm.bias"}
    model = Tied()
    assert folder_of(tmp_path, trained, rest_of(model)).load_model_into(model) == ("mask",)
    np.testing.assert_array_equal(model.head.weight.detach().numpy(), trained["embed.weight"])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.mask, torch.tril(torch.ones(4, 4)))


def test_a_whole_state_dict_with_both_names_of_a_tied_tensor(tmp_path, caplog):
    state = {name: value.numpy() + np.float32(1) for name, value in Tied().state_dict().items()}
    model = Tied()
    folder = folder_of(tmp_path, state | {"embed.weight": state["embed.weight"] + np.float32(2)})
    assert folder.load_model_into(model) == ()
    np.testing.assert_array_equal(model.embed.weight.detach().numpy(), state["head.weight"])  # as load_state_dict does it
    assert "'embed.weight' has another value than the array that is tied to it in the model" in caplog.text


def test_a_frozen_base_stays_and_must_be_that_of_the_run(tmp_path):
    trained = shifted(LoRA())
    folder = folder_of(tmp_path, trained, rest_of(LoRA()))
    model = LoRA()
    assert folder.load_model_into(model) == ("base.weight", "base.bias")
    np.testing.assert_array_equal(model.up.weight.detach().numpy(), trained["up.weight"])
    assert torch.equal(model.base.weight, LoRA().base.weight)
    other = LoRA(seed=2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"'base\.weight' is not that of the run.*; 'base\.bias' is not that of the run"):
        folder.load_model_into(other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(ValueError, match=r"'base\.weight' is trained by the model, and not in the run"):
        folder.load_model_into(LoRA().requires_grad_(True))


def test_arrays_without_names_are_taken_in_turn(tmp_path):
    model, state = Tied(), list(Tied().state_dict().values())
    folder = folder_of(tmp_path, {str(index): value.numpy() + np.float32(1) for index, value in enumerate(state)})
    assert folder.load_model_into(model) == ()
    with pytest.raises(ValueError, match="has 5 arrays without names; the model's state_dict has 2"):
        folder.load_model_into(nn.Linear(2, 2))


def test_the_model_of_a_run_that_did_not_end_is_told_as_such(tmp_path, caplog):
    folder = RunFolder.create(tmp_path / "run", {}, "run")
    for unfinished in ("", "after round 1"):
        folder.write_results(shifted(nn.Linear(2, 2)), unfinished=unfinished)
        folder.load_model_into(nn.Linear(2, 2))
        assert ("a run that did not end: after round 1" in caplog.text) is bool(unfinished)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weight": WEIGHT, "bias": np.zeros(3, np.float32)}, r"'bias' has shape \(3,\), in the model \(2,\)"),
        ({"weight": WEIGHT, "b": np.zeros(2, np.float32)}, "the model has no 'b'; 'bias' is trained by the model, and not in"),
        ({"weight": WEIGHT, "bias": np.zeros(2, np.int64)}, "'bias' has dtype int64, in the model torch.float32"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(arrays, message, tmp_path):
    model = nn.Linear(3, 2)
    before = [value.detach().clone() for value in model.parameters()]
    with pytest.raises(ValueError, match=message):
        folder_of(tmp_path, arrays).load_model_into(model)
    assert all(torch.equal(value, old) for value, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[" * 100_000, r"model\.json: must be a JSON object"),
        ("{}", r"is not the run's model: its SHA-256 is not that in model\.json"),
        ({"arrays": None}, r"model\.json: does not describe the arrays of model\.safetensors"),
        ({"not here": 3}, r"model\.json: does not describe the arrays of model\.safetensors"),
    ],
)
def test_a_description_that_is_not_the_models_is_refused(tmp_path, said, why):
    folder, model = RunFolder(tmp_path), nn.Linear(3, 2, bias=False)
    with pytest.raises(ValueError, match=r"has no model\.safetensors with its model\.json: only a run that has ended"):
        folder.load_model_into(model)
    folder.write_results({"weight": np.ones((2, 3), np.float32)})
    described = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(said if isinstance(said, str) else json.dumps(described | said))
    with pytest.raises(ValueError, match=why) as refused:
        folder.load_model_into(model)
    assert str(tmp_path) in str(refused.value)
