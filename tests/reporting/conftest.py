"""What tests of reports share: run folders."""

import json

import pytest
import tomli_w

from tests.cli.conftest import call  # noqa: F401

CONFIG = {"method": "dp-fedavg", "num-rounds": 2, "clip-norm": 0.5, "seed": 0, "output-dir": "x"}
GUARANTEE = {"private": True, "epsilon": 1.5, "delta": 1e-3, "unit": "client", "relation": "add-or-remove-one"}
GUARANTEE["protected_against"] = "outsiders"
STATEMENT = {"format": 2, "guarantee": GUARANTEE}
NOT_PRIVATE = {"format": 2, "guarantee": {"private": False, "epsilon": None}}


def stated(**guarantee):
    """A statement with another guarantee."""
    return {"format": 2, "guarantee": GUARANTEE | guarantee}


def line(at, accuracy, epsilon, **more):
    return {"round": at, "num-rounds": 2, "accuracy": accuracy, "loss": 2 * accuracy, "epsilon": epsilon, "delta": 1e-3} | more


@pytest.fixture
def write(tmp_path):
    """Write a run's folder and return its path."""

    def written(name, accuracies, *, statement=STATEMENT, finished=True, lines=None, **settings):
        folder = tmp_path / name
        folder.mkdir()
        config = CONFIG | {key.replace("_", "-"): value for key, value in settings.items()} | {"output-dir": str(folder)}
        (folder / "run-config.toml").write_text(tomli_w.dumps(config))
        if lines is None:
            lines = [line(at, value, 0.5 * at if at else 0.0) for at, value in enumerate(accuracies)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        if statement is not None:
            (folder / "statement.json").write_text(json.dumps(statement))
            if finished:
                (folder / "model.safetensors").write_bytes(b"")
                (folder / "model.json").write_text("{}")
        return str(folder)

    return written
