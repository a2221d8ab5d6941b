"""examples/lora, small: adapters alone cross the wire, and every process has the same base."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

import flower_dp
from flower_dp import wire
from flower_dp.apps.refusals import check
from flower_dp.apps.tasks.vision import import_torchvision
from flower_dp.clients.training.attributes import base_hash
from flower_dp.running.apps import own_app, read_app
from flower_dp.running.run_folder import RunFolder
from tests.grids import LocalGrid

pytestmark = [
    pytest.mark.skipif(not (find_spec("transformers") and find_spec("peft")), reason="needs transformers and peft"),
    pytest.mark.filterwarnings("ignore"),  # those of transformers and peft
]

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "lora"
# A layer of width 16 has LoRA on its two matrices, of rank 1: (16 + 48) + (16 + 64).
PARAMETERS = 144
DEFAULTS = read_app(EXAMPLE).defaults


@pytest.fixture(scope="module")
def example(tmp_path_factory: Any) -> Any:
    """The example's modules and a tiny base, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        patch.setenv("LORA_STYLE_FOLDER", str(tmp_path_factory.mktemp("bases")))
        import_torchvision()
        from lora_style import app, base, grammar

        yield SimpleNamespace(app=app, grammar=grammar, Base=base.Base, tiny=base.Base(layers=1, width=16, heads=2, steps=5))


def play(example: Any, folder: Path, base: Any = None, **settings: Any) -> LocalGrid:
    """Run the example with a tiny base, whose devices may have another one."""
    devices = base or example.tiny
    server, client = (
        flower_dp.app(
            model_fn=lambda model=model: example.app.make_model(model, rank=1),
            data_fn=example.app.load_records,
            evaluate_fn=example.app.evaluate,
        )
        for model in (example.tiny, devices)
    )
    config = {**DEFAULTS, "num-clients": 8, "num-rounds": 2, "sampling-rate": 0.9, "output-dir": str(folder), **settings}
    grid = LocalGrid(client.client, 2, **config)
    server.server(grid, Context(1, 1, {}, RecordDict(), config))
    return grid


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam"])
def test_adapters_alone_cross_the_wire(example: Any, tmp_path: Path, method: str) -> None:
    grid = play(example, tmp_path / "run", method=method)
    asked = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert len(asked) == 4
    for message in asked:
        arrays = message.content.array_records["arrays"]
        assert [name for name in arrays if ".lora_A." not in name and ".lora_B." not in name] == []
        assert (len(arrays), sum(array.numpy().size for array in arrays.values())) == (4, PARAMETERS)
        assert message.content.config_records["config"][wire.BASE] == base_of(example)
    for reply in grid.received:
        (arrays,) = reply.content.array_records.values()
        # The sum of the clients' rows: a number a parameter, and the indicator of the adaptive clip norm.
        assert sum(array.numpy().size for array in arrays.values()) == PARAMETERS + 1
        assert sum(len(array.data) for array in arrays.values()) < 8 * (PARAMETERS + 1) + 200 * len(arrays)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "perplexity" in line] == [0, 2]
    assert json.loads((tmp_path / "run" / "statement.json").read_text())["guarantee"]["private"]

    adapted = example.app.make_model(example.tiny, rank=1)
    stay = RunFolder(tmp_path / "run").load_model_into(adapted)
    assert not any("lora_" in name for name in stay)
    assert any(value.any() for name, value in adapted.named_parameters() if "lora_B" in name)  # zeros before a run


def base_of(example: Any) -> str:
    return base_hash(example.app.make_model(example.tiny, rank=1))


def test_a_base_is_trained_once_and_follows_from_its_seed(example: Any) -> None:
    first = base_hash(example.tiny.model().requires_grad_(False))
    written = example.tiny.file.stat().st_mtime_ns
    draws = torch.get_rng_state()
    assert base_hash(example.tiny.model().requires_grad_(False)) == first
    assert example.tiny.file.stat().st_mtime_ns == written
    example.tiny.file.unlink()
    assert base_hash(example.tiny.model().requires_grad_(False)) == first
    assert torch.equal(torch.get_rng_state(), draws)
    assert example.Base(layers=1, width=16, heads=2, steps=5, seed=2).file != example.tiny.file


def test_the_first_model_is_the_base_and_clients_have_sentences_of_their_own(example: Any) -> None:
    inputs, targets = example.app.load_records(5, 8)
    assert torch.equal(example.app.make_model(example.tiny)(inputs), example.app.LanguageModel(example.tiny.model())(inputs))
    assert inputs.shape == targets.shape == (8, example.grammar.LENGTH)
    assert torch.equal(inputs, example.app.load_records(5, 8)[0])
    assert not torch.equal(inputs, example.app.load_records(6, 8)[0])


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam"])
def test_the_examples_settings_are_valid(method: str) -> None:
    check({**own_app().defaults, **DEFAULTS, "method": method}, defaults=own_app().defaults, given=(), built=True)
