"""Apps of other people's shapes, each with stock Flower and with the few changed lines that docs/your-own-app.md names."""

import difflib
import importlib
import logging
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_dp.running.workplace import app_files_linked
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


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run an app on a grid in this process, where `flower-dp run` would run it; return the grid."""

    def run(shape, *, stock, tamper=None):
        folder, room = HERE / shape, tmp_path / ("stock" if stock else "private")
        room.mkdir()
        (room / "code").mkdir()
        for file in folder.glob("*.py"):
            if not file.name.startswith("stock_"):
                (room / "code" / file.name).write_text(file.read_text())
        for file in folder.glob("stock_*.py") if stock else ():
            (room / "code" / file.name.removeprefix("stock_")).write_text(file.read_text())
        (room / "run").mkdir()
        monkeypatch.setattr(sys, "path", [str(room / "code"), *sys.path])
        for name in ("task", "client_app", "server_app"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with app_files_linked(room / "run", folder):
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
def test_an_app_runs_with_stock_flower_and_with_the_change(shape, play, caplog):
    assert trained_by_all(play(shape, stock=True))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        grid = play(shape, stock=False)
    assert trained_by_all(grid)
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
    epsilon = float(
        re.search(r"^\(([\d.]+), 0.001\)-differential privacy for each client .* over 3 rounds\.$", said, re.MULTILINE)[1]
    )
    # Three Gaussian mechanisms of multiplier 0.31 are one of 0.31 / sqrt(3); Balle and Wang 2018, theorem 8.
    mu = math.sqrt(3) / 0.31
    tails = [math.erfc(-x / math.sqrt(2)) / 2 for x in (mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu)]
    assert tails[0] - math.exp(epsilon) * tails[1] == pytest.approx(1e-3, rel=1e-3)
    assert "1 updates that were asked for did not count: 1 from nodes that did not reply" in said


def test_a_model_with_batchnorm_is_refused_with_the_layer_and_what_to_do(play, monkeypatch):
    from flower_dp.clients.training import fixes

    monkeypatch.setattr("flower_dp.clients.fix_batchnorm", lambda model: model)
    assert fixes.fix_batchnorm is not None
    with pytest.raises(ValueError, match=r"layer '1': '1.running_mean' holds batch statistics.*GroupNorm"):
        play("batchnorm", stock=False)


def changed_lines(shape):
    """Lines that the private version of an app has and the stock version has not."""
    count = 0
    for stock in (HERE / shape).glob("stock_*.py"):
        private = stock.with_name(stock.name.removeprefix("stock_"))
        texts = [file.read_text().splitlines() for file in (stock, private)]
        count += sum(line.startswith("+ ") and bool(line[2:].strip()) for line in difflib.ndiff(*texts))
    return count


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


def test_a_final_model_is_what_the_private_run_made(play, tmp_path):
    play("pytorch", stock=False)
    made = torch.load(tmp_path / "private" / "run" / "final_model.pt")
    assert [tuple(value.shape) for value in made.values()] == [(8, 4), (8,), (3, 8), (3,)]
    assert all(value.isfinite().all() for value in made.values())
