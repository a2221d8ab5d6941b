"""Apps of other people's shapes, each with stock Flower and with the few changed lines that docs/your-own-app.md names."""

import difflib
import importlib
import logging
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_dp.running.run_workdir import app_files_linked
from tests.closed_forms import gaussian_epsilon
from tests.grids import LocalGrid

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs" / "your-own-app.md"
# What an app leaves in its working directory.
LEAVES = {
    "pytorch": "final_model.pt",
    "sklearn": "weights.json",
    "own-start": "results.json",
    "batchnorm": "final_model.pt",
    "buffers": "final_model.pt",
    "server-fn": None,
}


# What a change has put in, and what was there before.
CHANGES = (
    (
        "from flower_dp.core.sampling import FullSampling\nfrom flower_dp.strategies import DPFedAvg\n",
        "from flwr.serverapp.strategy import FedAvg\n",
    ),
    (r"FedAvg\(\s*clip_norm=[^)]*\)[^)]*\)", "FedAvg(fraction_train=1.0, fraction_evaluate=0.0)"),
    ("DPFedAvg", "FedAvg"),
    (r" *print\(strategy.statement\)\n|from flower_dp.clients import fix_batchnorm\n", ""),
    (r"fix_batchnorm\(model\)", "model"),
)


def versions(shape):
    """The files of an app: with stock Flower, and with the change; where more than that has changed, it has a file of its own."""
    found = {}
    for file in sorted((HERE / shape).glob("*.py"), key=lambda file: file.name.startswith("stock_")):
        name, before = file.name.removeprefix("stock_"), file.read_text()
        for new, old in CHANGES:
            before = re.sub(new, old, before)
        found[name] = before, found.get(name, ("", file.read_text()))[1]
    return found


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run an app on a grid in this process, where `flower-dp run` would run it; return the grid."""

    def run(shape, *, stock, tamper=None):
        room = tmp_path / ("stock" if stock else "private")
        room.mkdir()
        (room / "code").mkdir()
        for name, (before, after) in versions(shape).items():
            (room / "code" / name).write_text(before if stock else after)
        (room / "run").mkdir()
        monkeypatch.setattr(sys, "path", [str(room / "code"), *sys.path])
        for name in ("task", "client_app", "server_app"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with app_files_linked(room / "run", HERE / shape):
            monkeypatch.chdir(room / "run")
            client, server = (importlib.import_module(name).app for name in ("client_app", "server_app"))
            grid = LocalGrid(client, 4, tamper=tamper)
            server(grid, Context(1, 1, {}, RecordDict(), {"num-server-rounds": 2, "output-dir": "mine"}))
            monkeypatch.chdir(tmp_path)
        if LEAVES[shape]:
            assert [path.name for path in (room / "run").iterdir()] == [LEAVES[shape]]
        return grid

    yield run
    for name in ("task", "client_app", "server_app"):
        sys.modules.pop(name, None)


def trained_by_all(grid):
    """Whether every client has trained in every round."""
    replies = Counter(message.metadata.src_node_id for message in grid.received if not message.has_error())
    return len(grid.received) == replies.total() > 0 and len(replies) == 4 and len({*replies.values()}) == 1


@pytest.mark.parametrize("shape", LEAVES)
def test_an_app_runs_with_stock_flower_and_with_the_change(shape, play, tmp_path, caplog):
    assert trained_by_all(play(shape, stock=True))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        grid = play(shape, stock=False)
    assert trained_by_all(grid)
    if shape == "pytorch":
        made = torch.load(tmp_path / "private" / "run" / "final_model.pt")
        assert [tuple(value.shape) for value in made.values() if value.isfinite().all()] == [(8, 4), (8,), (3, 8), (3,)]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    said = [record.getMessage() for record in caplog.records]
    if shape != "own-start":  # whose loop tells of its own results
        assert sum(line.startswith("Privacy statement: ") for line in said) == 1


def test_the_statement_after_a_start_of_ones_own_counts_rounds_and_lost_replies(play, capsys):
    """advanced-pytorch's shape: the loop is the app's, ledger and statement are the strategy's."""
    rounds = Counter()

    def lose_one(node, reply):
        rounds[node] += 1
        return [] if (node, rounds[node]) == (2, 2) else [reply]

    grid = play("own-start", stock=False, tamper=lose_one)
    assert len(grid.received) == 11
    said = capsys.readouterr().out
    assert said.startswith("Privacy statement: DP-FedAvg\n")
    lines = [line.removeprefix("GUARANTEE").strip() for line in said.splitlines()]
    promise = re.compile(r"Each client has \(([\d.]+), 0.001\)-differential privacy \(.*\)\.")
    (epsilon,) = (float(found[1]) for line in lines if (found := promise.fullmatch(line)))
    assert re.fullmatch(r"Upper bound \(accountant .*\) for 3 charged rounds\.", lines[3])
    assert epsilon == pytest.approx(gaussian_epsilon([0.31] * 3, "add-or-remove-one", 1e-3), rel=1e-3)
    assert "1 requested updates did not count: 1 from nodes that did not reply" in said


def test_a_model_with_batchnorm_is_refused_with_the_layer_and_what_to_do(play, monkeypatch):
    from flower_dp.clients.training import batchnorm

    monkeypatch.setattr("flower_dp.clients.fix_batchnorm", lambda model: model)
    assert batchnorm.fix_batchnorm is not None
    with pytest.raises(ValueError, match=r"layer '1': '1.running_mean' holds batch statistics.*GroupNorm"):
        play("batchnorm", stock=False)


def changed_lines(shape):
    """Lines that the private version of an app has and the stock version has not."""
    lines = [line for both in versions(shape).values() for line in difflib.ndiff(*(text.splitlines() for text in both))]
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in lines)


def test_the_docs_tell_how_many_lines_change():
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| (\d+) \|$", DOCS.read_text(), re.MULTILINE))
    assert rows == {shape: str(changed_lines(shape)) for shape in LEAVES}


def test_the_migration_page_shows_the_lines_that_the_legacy_app_changes():
    page = DOCS.read_text()
    shown = page.split("### From `server_fn`")[1].split("# after\n")[1].split("```")[0].split("\n")
    named = [line for line in shown if line.startswith(("app =", "@app", "def main"))]
    stock, changed = (
        set((HERE / "server-fn" / name).read_text().splitlines()) for name in ("stock_server_app.py", "server_app.py")
    )
    assert named == ["app = ServerApp()", "@app.main()", "def main(grid: Grid, context: Context) -> None:"]
    assert {re.sub(r": \w+| -> None", "", line) if line.startswith("def") else line for line in named} <= changed - stock
    assert [line for line in changed if line.strip().startswith("strategy.start(grid, ArrayRecord(")]
