"""Changed files of a run's folder: a reader refuses them with a reason, or reads what is there."""

# ruff: noqa: PT017 (a refusal is as good as a right answer)
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flower_dp.reporting import compare, tables, update_norms
from flower_dp.reporting.past_run import read_past_run
from flower_dp.running import run_folder
from flower_dp.running.run_folder import RunFolder
from tests.adversaries.fuzzing import BOMBS, bounded, cut, examples, trees


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@st.composite
def changed(draw: st.DrawFn, content: bytes, *, read: Any = json.loads, write: Any = None) -> bytes:
    """Draw changed forms of a text file: of its tree, of its bytes, or another file altogether."""
    how = draw(st.sampled_from(["tree"] * 8 + ["bytes"] * 4 + ["bomb"] * 2))
    if how == "bytes":
        return bytes(cut(content, draw(st.integers(0, 2**32 - 1))))
    if how == "bomb":
        return draw(st.sampled_from([*BOMBS, "a = " + "[" * 10_000, "[" * 3000 + "a" + "]" * 3000, "\ufeff{}"])).encode()
    try:
        text: str = (write or json.dumps)(draw(trees(read(content.decode()))))
        return text.encode("utf-8", "surrogatepass")
    except (ValueError, TypeError):  # what the format can't hold
        return content


# The folder of a run

CONFIG = {"method": "dp-fedavg", "task": "mnist", "num-rounds": 2, "seed": 0, "data-dir": ""}
CONFIG |= {"dp-fedavg.clip-norm": 0.5, "dp-fedavg.noise-multiplier": 1.0}
STATEMENT = {"private": True, "epsilon": 1.5, "delta": 1e-3, "unit": "client", "relation": "add-or-remove-one"}
STATEMENT |= {"noise": {"clip_norm": 0.5, "noise_multiplier": 1.0}, "incidents": ["one"]}
NORMS = {"client-update-norm": 0.3, "client-update-norm-squared": 0.1, "clip-norm": 0.5}
ROWS = [
    {"round": at, "num-rounds": 2, "accuracy": 0.5 + 0.1 * at, "loss": 1.0, "epsilon": 0.5 * at, "delta": 1e-3, **NORMS}
    for at in range(3)
]
ARRAYS = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}


def lines_of(rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows.values())


def table_of(text: str) -> dict[str, Any]:
    return {str(index): json.loads(line) for index, line in enumerate(text.splitlines())}


@pytest.fixture(scope="module")
def written(place: Path) -> dict[str, bytes]:
    """The files of an honest run, by name."""
    folder = RunFolder.create(place / "honest", CONFIG, "honest")
    for row in ROWS:
        folder.append(row)
    folder.state(STATEMENT, "a statement")
    run_folder.write_whole(folder.path / run_folder.MODEL, run_folder._safetensors(ARRAYS))
    described = run_folder.described(ARRAYS, (folder.path / run_folder.MODEL).read_bytes(), {})
    (folder.path / run_folder.MODEL_JSON).write_text(json.dumps(described))
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


FORMS: dict[str, dict[str, Any]] = {
    run_folder.CONFIG: {"read": tomllib.loads, "write": tomli_w.dumps},
    run_folder.METRICS: {"read": table_of, "write": lines_of},
    run_folder.STATEMENT_JSON: {},
    run_folder.MODEL_JSON: {},
}


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.slow
@examples(60)
@pytest.mark.parametrize("name", [run_folder.CONFIG, run_folder.METRICS, run_folder.STATEMENT_JSON])
@given(data=st.data())
def test_a_changed_run_is_read_or_refused(name: str, data: st.DataObject, place: Path, written: dict[str, bytes]) -> None:
    """By a comparison and its tables, and by the norms of its updates; an error says which run is meant."""
    put(place / "changed", written | {name: data.draw(changed(written[name], **FORMS[name]))})
    with bounded(), np.errstate(all="ignore"):
        try:
            update_norms.in_words(update_norms.read_update_norms(read_past_run(place / "changed")))
        except ValueError as error:
            assert str(place) in str(error)
        try:
            runs = [compare.read_run(place / one, "accuracy") for one in ("honest", "changed")]
            curves = compare.curves_of(runs, "accuracy")
        except ValueError as error:
            assert str(place) in str(error)
            return
        notes = compare.notes(curves)
        for table in tables.FORMATS.values():
            table(curves, "accuracy", notes)
    stated = json.loads((place / "changed" / run_folder.STATEMENT_JSON).read_bytes())
    if not (stated.get("private") and isinstance(stated.get("epsilon"), int | float)):
        assert math.isinf(runs[1].epsilon)


@pytest.mark.slow
@examples(80)
@given(data=st.data())
def test_a_changed_model_is_the_runs_own_or_refused(data: st.DataObject, place: Path, written: dict[str, bytes]) -> None:
    name = data.draw(st.sampled_from([run_folder.MODEL, run_folder.MODEL_JSON]))
    content = written[name]
    other = data.draw(changed(content) if name == run_folder.MODEL_JSON else safetensors(content))
    put(place / "changed", written | {name: other})
    module = nn.Linear(3, 2)
    with bounded():
        try:
            RunFolder(place / "changed").load_model_into(module)
        except ValueError as error:
            assert str(place) in str(error)
        else:
            # A description with less in it is that of a smaller model, which the module is not.
            assert np.array_equal(module.weight.detach().numpy(), ARRAYS["weight"])
        try:
            arrays = read_past_run(place / "changed").model()
        except ValueError as error:
            assert str(place) in str(error)
        else:
            assert sum(array.nbytes for array in arrays.values()) <= len(other if name == run_folder.MODEL else content)


@st.composite
def safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a changed model: its bytes, or a header that claims much."""
    how = draw(st.sampled_from(["bytes", "header", "length"]))
    if how == "bytes":
        return bytes(cut(content, draw(st.integers(0, 2**32 - 1))))
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    if how == "length":
        return draw(st.sampled_from([0, 1, size + 1, 2**32, 2**63, 2**64 - 1])).to_bytes(8, "little") + content[8:]
    text = json.dumps(draw(trees(header))).encode()
    return len(text).to_bytes(8, "little") + text + body
