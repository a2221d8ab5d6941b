"""What a sweep writes: public numbers alone, a row a run, a row a point, the best point."""

import csv
import json
import re
from dataclasses import replace

import pytest

from flower_dp.sweeps.file import SelectionRule
from flower_dp.sweeps.results import Results
from flower_dp.sweeps.sweep import Sweep
from tests.sweeps.conftest import finish

GRID = "seeds = 2\n[grid]\n'dp-fedsam.epsilon' = [1.0, 4.0]\n"


@pytest.fixture
def made(folder, runs):
    """A sweep of four runs, of which three have finished."""
    four = runs(GRID)
    for run, accuracy, epsilon in zip(four[:3], (0.5, 0.7, 0.6), (1.0, 4.0, 1.0), strict=True):
        more = {"validation-accuracy": accuracy, "private-loss": 0.3, "client-norm": 9.0, "secret": None}
        finish(folder.of(run), run.config, accuracy, epsilon=epsilon, **more)
    return Results(folder=folder, runs=four, metric="accuracy")


def rows(results):
    results.write_rows()
    return list(csv.DictReader((results.folder.path / "results.csv").read_text().splitlines()))


def test_a_row_for_each_run(made):
    found = rows(made)
    assert [(row["dp-fedsam.epsilon"], row["seed"], row["state"], row["accuracy"], row["epsilon"]) for row in found] == [
        ("1.0", "0", "finished", "0.5", "1.0"),
        ("4.0", "0", "finished", "0.7", "4.0"),
        ("1.0", "1", "finished", "0.6", "1.0"),
        ("4.0", "1", "not begun", "", ""),
    ]
    assert found[0]["folder"] == f"runs/{made.runs[0].name}"
    assert found[0]["command"] == made.runs[0].command
    assert (found[0]["delta"], found[0]["unit"], found[0]["private-loss"]) == ("0.001", "client", "0.3")
    assert (found[0]["relation"], found[0]["protected_against"]) == ("add-or-remove-one", "outsiders")
    commands = (made.folder.path / "commands.txt").read_text()
    assert f"# dp-fedsam.epsilon=1.0, seed 1\n{made.runs[2].command}\n" in commands


def test_rows_have_public_numbers_alone(made):
    """No time of a run whose times tell how many clients took part, and nothing that clients were asked for."""
    (first, *_) = rows(made)
    assert not {"client-norm", "secret", "cohort-is-secret", "cohort-size"} & first.keys()
    assert first["seconds"] == ""
    (made.folder.of(made.runs[0]) / "statement.json").write_text(json.dumps({"format": 2, "guarantee": {"private": False}}))
    finish(made.folder.of(made.runs[1]), made.runs[1].config, 0.7, finished=False, elapsed=12.5)
    (made.folder.of(made.runs[1]) / "statement.json").unlink()
    found = rows(made)
    assert (found[0]["epsilon"], found[1]["epsilon"], found[1]["state"], found[1]["rounds"]) == ("inf", "", "unfinished", "1")
    assert (found[0]["seconds"], found[1]["seconds"]) == ("", "12.5")


def test_the_table_has_mean_and_spread(made):
    curves = made.curves()
    assert [(len(curve.runs), float(curve.mean[-1])) for curve in curves] == [(2, pytest.approx(0.55)), (1, 0.7)]
    made.write_table(curves, "")
    text = (made.folder.path / "table.md").read_text()
    guarantee = "0.001 | client, add-or-remove-one | outsiders"
    assert f"| dp-fedsam.epsilon=1 | 2 | 55.00 ± 7.07 | 1.000 | {guarantee} | 1 |" in text  # 0.1 / sqrt(2)
    assert "epsilon <= 4" not in text  # one row would be no pivot
    assert "Not in the table (unfinished, or without accuracy): dp-fedsam.epsilon=4.0, seed 1." in text
    assert "Not covered: choosing among the runs" in text
    assert (made.runs[1].command in text, made.runs[2].command in text) == (True, False)
    assert made.draw(curves).read_bytes().startswith(b"\x89PNG")
    made.write_table([], "")
    assert made.draw([]) is None


def test_a_metric_that_no_run_has_is_named(made, write):
    wrong = replace(made, metric="acuracy")
    assert wrong.curves() == []
    wrong.write_table([], "")
    line = "metric='acuracy': must be in a finished run; they have accuracy, validation-accuracy, private-loss"
    assert (made.folder.path / "table.md").read_text().startswith(f"{line}\n")
    sweep = Sweep.read(write(f"metric = 'acuracy'\nselect = {{metric = 'los', mode = 'max'}}\n{GRID}"))
    assert sweep.best(wrong) == f"select.{line}".replace("acuracy", "los")
    assert sweep.unknown(made.folder) == [line, line.replace("acuracy", "los")]


def test_the_best_point_has_all_its_runs(made, write):
    best = made.best(SelectionRule(metric="validation-accuracy", mode="max"))
    assert (best.run, best.mean, best.num_seeds) == (made.runs[0], pytest.approx(0.55), 2)  # the other one has no second run
    finish(made.folder.of(made.runs[3]), made.runs[3].config, 0.3, **{"validation-accuracy": 0.3})
    assert made.best(SelectionRule(metric="validation-accuracy", mode="min")).run == made.runs[1]
    assert made.best(SelectionRule(metric="none", mode="max")) is None


@pytest.mark.parametrize("metric", ["validation-accuracy", "accuracy"])
def test_what_choosing_costs_is_said(made, write, metric):
    path = write(f"select = {{metric = '{metric}', mode = 'max'}}\n{GRID}")
    sweep = Sweep.read(path)
    said = sweep.best(made)
    assert said.startswith(f"Best by {metric} (max), 0.55 on the mean of 2 seeds: dp-fedsam.epsilon=1.0.\n{made.runs[0].command}")
    assert "Not covered: choosing among the runs" in said
    assert ("is on the test records" in said) is (metric == "accuracy")
    assert re.match(rf"Best by {metric} \(max\), 0\.\d+ of its one seed: ", sweep.best(replace(made, runs=made.runs[:1])))
    assert Sweep.read(write(GRID)).best(made) == ""
