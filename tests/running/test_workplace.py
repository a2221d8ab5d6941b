import os
from pathlib import Path

import pytest

from flower_dp.running.run_workdir import app_files_linked


@pytest.fixture
def app(tmp_path):
    folder = tmp_path / "app"
    own = ("data/iris.csv", "config.toml", "old.pt", "package/labels.json", "package/deep/more.csv", "runs/first/model.pt")
    others = ("pyproject.toml", "train.py", ".env", "metrics.jsonl", "run-config.toml", "package/__init__.py")
    for path in (*own, *others, "package/__pycache__/x.pyc"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("own = true")
    (folder / "broken").symlink_to("nowhere")
    return folder


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def files(folder):
    return sorted(str(Path(place, name).relative_to(folder)) for place, _, names in os.walk(folder) for name in names)


def test_an_app_reads_what_lies_in_its_folder_and_no_module_lies_there(app, run, monkeypatch):
    python = ("train.py", "package/__init__.py", "pyproject.toml", "package/__pycache__")
    with app_files_linked(run, app):
        monkeypatch.chdir(run)
        for path in ("data/iris.csv", "config.toml", "old.pt", "package/labels.json", "package/deep/more.csv"):
            assert Path(path).read_text() == (app / path).read_text()
        assert not any(Path(path).exists() for path in (*python, ".env", "metrics.jsonl", "run-config.toml", "broken"))
    assert list(run.iterdir()) == []


def test_what_an_app_writes_stays_in_the_runs_folder(app, run, monkeypatch):
    with app_files_linked(run, app):
        monkeypatch.chdir(run)
        Path("final_model.pt").write_text("new")
        Path("package/cache.csv").write_text("new")
        Path("results").mkdir()
        Path("results/a.json").write_text("new")
    assert files(run) == ["final_model.pt", "package/cache.csv", "results/a.json"]
    assert not (app / "final_model.pt").exists()


def test_what_an_app_writes_over_is_in_both_places(app, run, monkeypatch):
    with app_files_linked(run, app):
        monkeypatch.chdir(run)
        Path("old.pt").write_text("new")
        Path("data/more.csv").write_text("4")
    assert files(run) == ["old.pt"]  # what lies in a folder of the app stays there, as under `flwr run`
    assert not (run / "old.pt").is_symlink()
    assert (run / "old.pt").read_text() == (app / "old.pt").read_text() == "new"
    assert (app / "data" / "more.csv").read_text() == "4"


def test_a_file_that_takes_a_links_place_stays(app, run):
    with app_files_linked(run, app):
        (run / "config.toml").unlink()
        (run / "config.toml").write_text("of the run")
    assert (run / "config.toml").read_text() == "of the run"
    assert (app / "config.toml").read_text() == "own = true"


def test_a_run_inside_the_apps_folder_is_not_linked_into_itself(app):
    run = app / "inside"
    run.mkdir()
    with app_files_linked(run, app):
        assert not (run / "inside").exists()
        assert (run / "data" / "iris.csv").exists()
