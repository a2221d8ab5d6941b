import json
import math

import numpy as np
import pytest
import tomli_w

from flower_dp.cli import main as cli
from flower_dp.reporting import compare, tables
from flower_dp.reporting.figures import figure

CONFIG = {"method": "dp-fedavg", "num-rounds": 2, "clip-norm": 0.5, "seed": 0, "output-dir": "x"}
STATEMENT = {"private": True, "epsilon": 1.5, "delta": 1e-3, "unit": "client", "relation": "add-or-remove-one"}
PNG = b"\x89PNG\r\n\x1a\n"


def line(at, accuracy, epsilon, **more):
    return {"round": at, "num-rounds": 2, "accuracy": accuracy, "loss": 2 * accuracy, "epsilon": epsilon, "delta": 1e-3} | more


@pytest.fixture
def write(tmp_path):
    """Write a run's folder and return its path."""

    def written(name, accuracies, *, statement=STATEMENT, finished=True, lines=None, **settings):
        folder = tmp_path / name
        folder.mkdir()
        config = CONFIG | {key.replace("_", "-"): value for key, value in settings.items()} | {"output-dir": str(folder)}
        (folder / "config.toml").write_text(tomli_w.dumps(config))
        if lines is None:
            lines = [line(at, value, 0.5 * at if at else 0.0) for at, value in enumerate(accuracies)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        if statement is not None:
            (folder / "statement.json").write_text(json.dumps(statement))
            if finished:
                (folder / "model.safetensors").write_bytes(b"")
        return str(folder)

    return written


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", *arguments])
        return ended.value.code, *capsys.readouterr()

    return run


def curves(*folders, metric="accuracy", **options):
    return compare.curves_of([compare.read_run(folder, metric, **options) for folder in folders], metric)


# curves


def test_runs_that_differ_in_the_seed_are_one_curve(write):
    (curve,) = curves(write("a", [0.1, 0.5, 0.7]), write("b", [0.1, 0.4, 0.8], seed=1), write("c", [0.1, 0.6, 0.9], seed=2))
    assert curve.rounds.tolist() == [0, 1, 2]
    assert curve.mean == pytest.approx([0.1, 0.5, 0.8])
    assert curve.std == pytest.approx([0, 0.1, 0.1], abs=1e-12)  # deviations of -0.1, 0, 0.1: sqrt(0.02 / 2)
    assert curve.spent.tolist() == [0, 0.5, 1.0]
    assert (curve.label, curve.epsilon) == ("dp-fedavg", 1.5)


def test_labels_are_the_keys_in_which_curves_differ(write):
    found = curves(
        write("a", [0.1, 0.5], epsilon=5.0, cohort_size=1, relation="", uniform=True),
        write("b", [0.1, 0.5], epsilon=10.5, cohort_size=1, relation="", uniform=True),
        write("c", [0.1, 0.5], epsilon=5, cohort_size=10, relation="replace-one", uniform=False),
        write("d", [0.1, 0.7], epsilon=5.0, cohort_size=1, relation="", uniform=True, seed=4),
    )
    assert [(curve.label, len(curve.runs)) for curve in found] == [
        ('epsilon=5, cohort-size=1, relation="", uniform=true', 2),
        ('epsilon=10.5, cohort-size=1, relation="", uniform=true', 1),
        ("epsilon=5, cohort-size=10, relation=replace-one, uniform=false", 1),
    ]
    assert found[0].mean == pytest.approx([0.1, 0.6])


def test_keys_that_older_runs_do_not_know_are_in_a_label_where_it_needs_them(write):
    old, new = write("a", [0.1]), write("b", [0.1], bias=True)
    assert [curve.label for curve in curves(old, new)] == ["bias not set", "bias=true"]
    newest = write("c", [0.1], bias=True, clip_norm=1.0)
    assert [curve.label for curve in curves(old, newest)] == ["clip-norm=0.5", "clip-norm=1"]


def test_a_label_has_no_settings_of_another_method(write):
    tables = {"dp-fedavg.clip-norm": 0.5, "dp-fedsam.clip-norm": 0.5}
    first, second = write("a", [0.1], **tables), write("b", [0.1], **tables | {"dp-fedavg.clip-norm": 2.0})
    sam = write("c", [0.1], method="dp-fedsam", **tables | {"dp-fedsam.clip-norm": 1.0})
    assert [curve.label for curve in curves(first, sam)] == ["method=dp-fedavg", "method=dp-fedsam"]
    assert [curve.label for curve in curves(first, second, sam)] == [
        "method=dp-fedavg, dp-fedavg.clip-norm=0.5",
        "method=dp-fedavg, dp-fedavg.clip-norm=2",
        "method=dp-fedsam, dp-fedsam.clip-norm=1",
    ]


def test_the_loss(write):
    (curve,) = curves(write("a", [0.1, 0.5]), write("b", [0.3, 0.5], seed=1), metric="loss")
    assert curve.mean == pytest.approx([0.4, 1.0])
    assert curve.std == pytest.approx([math.sqrt(0.08), 0])  # 0.2 and 0.6


def test_any_metric_that_runs_have(write, call):
    lines = [line(at, 0.5, 0.1, perplexity=40.0 - at, note="text", best=True) for at in range(3)]
    folder = write("a", [], lines=lines)
    status, out, _ = call(folder, "--metric", "perplexity")
    assert status == 0
    assert "final perplexity" in out
    assert "38 " in out
    drawn = figure(curves(folder, metric="perplexity"), "perplexity")
    assert drawn.axes[0].get_ylabel() == "perplexity"
    assert drawn.get_suptitle().startswith("Perplexity: one run a curve")
    status, _, err = call(folder, "--metric", "speed")
    assert status == 2
    assert "has no speed in metrics.jsonl, but accuracy, loss, epsilon, delta, perplexity: set --metric" in err


def test_rounds_are_those_that_all_runs_have(write):
    (curve,) = curves(write("a", [0.1, 0.5, 0.7]), write("b", [0.1, 0.7], seed=1))
    assert curve.rounds.tolist() == [0, 1]
    assert curve.mean == pytest.approx([0.1, 0.6])
    assert compare.notes([curve]) == ["dp-fedavg: its runs end in different rounds; compared up to the last that all have"]


def test_rounds_without_a_test_are_bridged_and_a_loss_that_is_not_finite_is_no_gain(write):
    lines = [line(0, 0.1, 0.0), {"round": 1, "epsilon": 0.5}, line(2, 0.4, 1.0, loss=None)]
    folder = write("a", [], lines=lines)
    assert curves(folder)[0].rounds.tolist() == [0, 2]
    (curve,) = curves(folder, metric="loss")
    assert np.isnan(curve.mean).tolist() == [False, True]
    assert "not finite" in tables.text([curve], "loss")


def test_not_private_is_infinite_whatever_the_rounds_say(write):
    nothing = write("a", [0.1, 0.5], statement={"private": False, "epsilon": None}, clip_norm=9.0)
    seeded = write("b", [0.1, 0.5], statement=STATEMENT | {"private": False})
    for curve in curves(nothing, seeded):
        assert math.isinf(curve.epsilon)
        assert np.isinf(curve.spent).all()


def test_the_epsilon_is_the_largest_of_the_statements(write):
    (curve,) = curves(write("a", [0.1]), write("b", [0.1], seed=1, statement=STATEMENT | {"epsilon": 1.75}))
    assert curve.epsilon == 1.75


def test_epsilons_of_different_guarantees_are_not_to_be_compared(write):
    same = curves(write("a", [0.1]), write("b", [0.1], clip_norm=1.0))
    assert compare.notes(same) == []
    record = write("c", [0.1], clip_norm=2.0, statement=STATEMENT | {"unit": "record"})
    assert "different units" in compare.notes([*same, *curves(record)])[0]


# the table and the picture


def test_table_and_picture(write, call, tmp_path):
    folders = [
        write("a", [0.1, 0.5, 0.7]),
        write("b", [0.1, 0.4, 0.8], seed=1),
        write("c", [0.1, 0.6, 0.9], clip_norm=1.0, statement={"private": False, "epsilon": None}),
    ]
    status, out, err = call(*folders)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "curve          seeds  final accuracy (%)  tight epsilon (largest)  delta  protects                   rounds",
        "clip-norm=0.5  2      75 +- 7.1           1.5                      0.001  client, add-or-remove-one  2",
        "clip-norm=1    1      90                  not private              -      -                          2",
        "figure: comparison.png",
    ]
    assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)
    status, out, _ = call(*folders, "--metric", "loss", "--output", "loss.png")
    assert status == 0
    assert "1.5 +- 0.14" in out  # twice the accuracy, 0.75 +- 0.0707
    assert (tmp_path / "loss.png").is_file()


def test_repetitions_with_one_seed_are_told(write, call):
    status, out, _ = call(write("a", [0.1, 0.5]), write("b", [0.1, 0.6]))
    assert status == 0
    assert "dp-fedavg  1 (2 runs)" in out


def test_the_picture_tells_what_it_shows(write):
    from matplotlib.figure import Figure

    found = curves(
        write("a", [0.1, 0.5, 0.7]),
        write("b", [0.1, 0.4, 0.8], seed=1),
        write("c", [0.1, 0.6, 0.9], clip_norm=1.0, statement={"private": False, "epsilon": None}),
    )
    drawn = figure(found, "accuracy")
    assert isinstance(drawn, Figure)
    rounds, spent = drawn.axes
    assert [len(axes.containers) for axes in drawn.axes] == [2, 1]
    assert rounds.containers[0].has_yerr
    assert not rounds.containers[1].has_yerr  # one run has no spread
    assert spent.containers[0].lines[0].get_xdata().tolist() == [0, 0.5, 1.0]
    assert spent.get_xlabel() == "epsilon spent (delta 0.001; client, add-or-remove-one)"
    assert "standard deviation" in drawn.get_suptitle()
    names = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert names == ["clip-norm=0.5\ntight epsilon 1.5, n = 2", "clip-norm=1\nnot private, n = 1"]


def test_only_rounds_where_nothing_is_private(write):
    drawn = figure(curves(write("a", [0.1, 0.5], statement={"private": False, "epsilon": None})), "accuracy")
    assert len(drawn.axes) == 1
    assert "spread over seeds is not known" in drawn.get_suptitle()


def test_many_curves_are_told_apart(write):
    folders = [write(f"r{size}", [0.1] * 30, cohort_size=size) for size in range(1, 10)]
    looks = set()
    for container in figure(curves(*folders), "accuracy").axes[0].containers:
        drawn = container.lines[0]
        looks.add((drawn.get_color(), drawn.get_linestyle()))
    assert len(looks) == 9


# refusals


def test_bad_folders_are_named_in_one_line(write, call, tmp_path):
    good = write("good", [0.1, 0.5])
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = write("broken", [0.1])
    (tmp_path / "broken" / "config.toml").write_text("= 3")
    odd = write("odd", [0.1])
    (tmp_path / "odd" / "metrics.jsonl").write_text("[]\n")
    torn = write("torn", [0.1])
    (tmp_path / "torn" / "statement.json").write_text("{")
    for arguments, named in [
        (["nowhere"], "nowhere: is not a run folder: it has no config.toml"),
        ([good, str(empty)], f"{empty}: is not a run folder"),
        ([good, write("silent", [])], "silent: has no accuracy in metrics.jsonl"),
        ([good, broken], f"{broken}: can't be read"),
        ([good, odd], f"{odd}: can't be read"),
        ([good, torn], f"{torn}: can't be read"),
        ([good, write("lossless", [], lines=[{"round": 1, "accuracy": 0.5}]), "--metric", "loss"], "lossless: has no loss"),
        ([good, write("unfinished", [0.1], statement=None)], "unfinished: the run was not finished (no model.safetensors)"),
        ([good, f"{good}/../good"], "good: is given twice"),
        ([good, write("later", [], lines=[line(7, 0.5, 1.0)], seed=1)], "later: has no accuracy of a round that"),
        ([good, "--output", "x.doc"], "--output=x.doc: must end in one of "),
        ([good, "--output", "no/where.png"], "--output=no/where.png: can't be written"),
        ([good, "--metric", "speed"], "--metric"),
        ([], "RUN"),
    ]:
        status, out, err = call(*arguments)
        assert (status, out) == (2, ""), named
        assert err.count("\n") == 1
        assert named in err


def test_unfinished_runs_are_taken_if_asked_for(write, call):
    folder = write("a", [0.1, 0.5], statement=None)
    status, out, _ = call(folder, "--allow-unfinished")
    assert status == 0
    assert f"note: {folder}: not finished; its rounds so far are used" in out
    (curve,) = curves(folder, allow_unfinished=True)
    assert curve.epsilon == 0.5
    failed = write("c", [0.1, 0.5], finished=False)
    (curve,) = curves(failed, allow_unfinished=True)
    assert curve.epsilon == STATEMENT["epsilon"]
    endless = write("b", [], lines=[line(0, 0.1, 0.0), line(1, 0.2, None)], statement=None)
    assert math.isinf(curves(endless, allow_unfinished=True)[0].epsilon)


def test_a_clip_norm_that_moves_has_a_panel_of_its_own(write):
    fixed = write("fixed", [0.1, 0.5, 0.8], seed=1)
    lines = [line(0, 0.1, 0.0), *(line(at, 0.3 * at, 0.5 * at, **{"clip-norm": 4.0 / at}) for at in (1, 2))]
    moving = write("moving", [], lines=lines, clip_quantile=0.5)
    made = curves(fixed, moving)
    assert np.isnan(made[0].clip_norms).all()
    assert made[1].clip_norms[1:].tolist() == [4.0, 2.0]
    assert len(figure(made[:1], "accuracy").axes) == 2
    axes = figure(made, "accuracy").axes
    assert [one.get_ylabel() for one in axes] == ["test accuracy (%)", "", "clip norm"]
    (drawn,) = axes[-1].get_lines()
    assert drawn.get_ydata()[1:].tolist() == [4.0, 2.0]
