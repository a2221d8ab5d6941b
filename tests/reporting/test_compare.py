import csv
import json
import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_dp.reporting import compare, tables
from flower_dp.reporting.figures import against_epsilon, figure
from tests.reporting.conftest import GUARANTEE, NOT_PRIVATE, line, stated


@pytest.fixture(autouse=True)
def most_pictures_are_not_drawn(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)


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


def test_any_metric_that_runs_have_where_they_have_it(write, call):
    lines = [line(0, 0.1, 0.0, rmse=9.0), {"round": 1, "epsilon": 0.5}, line(2, 0.4, 1.0, rmse=7.5, loss=None, best=True)]
    folder = write("a", [], lines=lines)
    (curve,) = curves(folder, metric="rmse")
    assert (curve.rounds.tolist(), curve.mean.tolist()) == ([0, 2], [9.0, 7.5])
    drawn = figure([curve], "rmse")
    assert (drawn.axes[0].get_ylabel(), drawn.get_suptitle()[:18]) == ("rmse", "Rmse: one run per ")
    assert "not finite" in tables.text(curves(folder, metric="loss"), "loss")
    status, _, err = call("compare", folder, "--metric", "speed")
    assert status == 2
    assert "has no speed in metrics.jsonl, but accuracy, loss, epsilon, delta, rmse; set --metric" in err


def test_rounds_are_those_that_all_runs_have(write):
    (curve,) = curves(write("a", [0.1, 0.5, 0.7]), write("b", [0.1, 0.7], seed=1))
    assert curve.rounds.tolist() == [0, 1]
    assert curve.mean == pytest.approx([0.1, 0.6])
    assert compare.notes([curve]) == ["dp-fedavg: its runs end in different rounds; compared up to the last that all have"]


def test_not_private_is_infinite_whatever_the_rounds_say(write):
    nothing = write("a", [0.1, 0.5], statement=NOT_PRIVATE, clip_norm=9.0)
    seeded = write("b", [0.1, 0.5], statement=stated(private=False))
    for curve in curves(nothing, seeded):
        assert math.isinf(curve.epsilon)
        assert np.isinf(curve.spent).all()


def test_epsilons_of_different_guarantees_are_not_to_be_compared(write):
    same = curves(write("a", [0.1]), write("b", [0.1], clip_norm=1.0))
    assert compare.notes(same) == []
    record = write("c", [0.1], clip_norm=2.0, statement=stated(unit="record"))
    assert "different units" in compare.notes([*same, *curves(record)])[0]
    told = curves(*(write(name, [0.1], size=name, statement=stated(protected_against=name)) for name in ("d", "e")))
    note = "the epsilons hold against different adversaries (d; or e): don't compare them with each other"
    assert compare.notes(told) == [note]
    assert json.loads(tables.as_json(told, "accuracy"))["curves"][0]["against"] == "d"


def test_private_evaluations_are_told_below_a_table_of_another_metric(write):
    def told(value, error):
        return line(1, 0.5, 0.5) | {"private-accuracy": value, "private-accuracy-standard-error": error}

    first = write("a", [], lines=[told(0.1, 0.5), told(0.7, 0.03)])
    second = write("b", [], lines=[told(0.8, 0.04), line(2, 0.6, 0.5)], seed=1)
    notes = compare.notes(curves(first, second))
    # Means of two runs: (0.7 + 0.8) / 2, and sqrt(0.03^2 + 0.04^2) / 2.
    assert "dp-fedavg: private accuracy 75.0 ± 2.5 %; these evaluations are charged" in notes


def test_runs_of_different_tasks_are_not_to_be_compared(write):
    found = curves(write("a", [0.1], task="mnist"), write("b", [0.1], task="adult", data_dir="here"))
    assert compare.notes(found) == [
        "the runs are tested on different records (task=mnist, task=adult): don't compare their metrics with each other"
    ]
    adult = {"task": "adult", "adult.features": "all"}
    found = curves(write("f", [0.1], **adult), write("g", [0.1], **adult | {"adult.features": "categorical"}))
    assert "(adult.features=all, adult.features=categorical)" in compare.notes(found)[0]


def test_the_epsilon_of_every_round_is_the_largest_over_seeds_and_ends_at_the_tables(write):
    lines = [line(0, 0.1, 0.0), line(1, 0.4, 1.2), line(2, 0.5, 1.51)]  # an upper bound, a little above the statement's 1.5
    (curve,) = curves(write("a", [], lines=lines), write("b", [0.1, 0.4, 0.8], seed=1, statement=stated(epsilon=0.9)))
    assert (curve.spent.tolist(), curve.epsilon) == ([0.0, 1.2, 1.5], 1.5)


def test_where_no_round_tells_an_epsilon_each_may_have_cost_all(write):
    """As of a run that was chosen by `sweep --private-selection`."""
    lines = [{key: value for key, value in line(at, 0.5, 0.0).items() if key != "epsilon"} for at in (0, 1, 2)]
    (curve,) = curves(write("a", [], lines=lines))
    assert curve.spent.tolist() == [0.0, 1.5, 1.5]


def test_an_epsilon_is_never_shown_smaller_than_it_is(write):
    (curve,) = curves(write("a", [0.1], statement=stated(epsilon=1.23401)))
    assert curve.format_epsilon() == "1.235"
    (curve,) = curves(write("b", [0.1], statement=stated(epsilon=4.0)))
    assert curve.format_epsilon() == "4"


# labels


def test_a_label_has_no_setting_that_nothing_reads(write):
    first = {"method": "dp-fedavg", "momentum": 0.5, "sampling": "poisson", "sampling_rate": 0.1, "cohort_size": 0}
    second = {"method": "nbafl", "momentum": 0.0, "sampling": "full", "sampling_rate": 0.5, "nbafl.epsilon": 8.0}
    third = {"method": "fedsgd-dpc", "momentum": 0.9, "sampling": "round-robin", "cohort_size": 5, "nbafl.epsilon": 2.0}
    assert [curve.label for curve in curves(write("a", [0.1], **first), write("b", [0.1], **second))] == [
        "method=dp-fedavg, momentum=0.5, sampling=poisson",
        "method=nbafl, momentum=0, sampling=full",
    ]
    found = curves(write("c", [0.1], **third), write("d", [0.1], **third | {"momentum": 0.1, "nbafl.epsilon": 3.0, "seed": 1}))
    assert [len(curve.runs) for curve in found] == [2]


def test_where_much_differs_a_label_has_what_tells_the_curves_apart_and_a_note_the_rest(write):
    own = {"dp-fedavg.clip-norm": 0.5, "dp-fedavg.noise-multiplier": 1.0, "dp-fedavg.delta": 0.1, "dp-fedavg.relation": ""}
    first = {"method": "dp-fedavg", "model": "cnn", "rate": 0.1, "size": 4, "decay": 0.5} | own
    second = {"method": "nbafl", "model": "mlp", "rate": 0.2, "size": 8, "decay": 0.0, "nbafl.epsilon": 1.0}
    folders = [
        write("a", [0.1], **first),
        write("b", [0.1], **first | {"dp-fedavg.noise-multiplier": 2.0}),
        write("c", [0.1], **second),
    ]
    found = curves(*folders)
    assert [curve.label for curve in found] == [
        "method=dp-fedavg, dp-fedavg.noise-multiplier=1",
        "method=dp-fedavg, dp-fedavg.noise-multiplier=2",
        "method=nbafl",
    ]
    assert compare.notes(found) == ["the curves also differ in model (cnn, mlp); rate (0.1, 0.2); size (4, 8); decay (0.5, 0)"]
    assert found[0].differ["rate"] == 0.1
    assert [curve.line for curve in found] == ["method=dp-fedavg"] * 2 + ["method=nbafl"]


def test_names_of_ones_own(write, call):
    noise = "dp-fedavg.noise-multiplier"
    runs = [write(f"{z}-{seed}", [0.1, 0.5], seed=seed, **{noise: z}) for z in (1.0, 2.0) for seed in (0, 1)]
    found = [compare.read_run(folder, "accuracy") for folder in runs]
    each = compare.curves_of(found, "accuracy", names=["ours"] * 2 + ["theirs"] * 2)
    assert [(curve.label, curve.line, len(curve.runs)) for curve in each] == [("ours", "ours", 2), ("theirs", "theirs", 2)]
    assert [curve.label for curve in compare.curves_of(found, "accuracy", names=["a", "b"])] == ["a", "b"]
    shared = compare.curves_of(found, "accuracy", names=["ours"] * 4)  # no mean over different settings
    assert [(curve.label, curve.line) for curve in shared] == [(f"ours, {noise}=1", "ours"), (f"ours, {noise}=2", "ours")]
    filled = compare.curves_of(found, "accuracy", names=["{method} ({noise-multiplier})"])
    assert [curve.label for curve in filled] == ["dp-fedavg (1)", "dp-fedavg (2)"]
    status, _, err = call("compare", *runs, "--label", "a", "--label", "b", "--label", "c")
    assert (status, err) == (2, "error: --label: given 3 times; must be one for each of 4 runs or of 2 curves\n")


def test_curves_by_a_setting(write, call):
    runs = [
        write(f"{method}-{z}", [0.1, 0.5], method=method, **{f"{method}.noise-multiplier": z, "size": size})
        for size, (method, z) in enumerate((("dp-fedavg", 1.0), ("dp-fedavg", 2.0), ("dp-fedsam", 2.0)))
    ]
    found = [compare.read_run(folder, "accuracy") for folder in runs]
    grouped = compare.curves_of(found, "accuracy", group_by=["noise-multiplier"])
    assert [curve.line for curve in grouped] == ["noise-multiplier=1", "noise-multiplier=2", "noise-multiplier=2"]
    assert grouped[0].label.startswith("noise-multiplier=1, ")
    drawn = figure(grouped, "accuracy", grouped=True).axes[0].containers
    colors, styles = zip(*((one.lines[0].get_color(), one.lines[0].get_linestyle()) for one in drawn), strict=True)
    assert colors[0] != colors[1] == colors[2]
    assert styles[1] != styles[2]
    status, _, err = call("compare", *runs, "--group-by", "speed")
    assert (status, err) == (2, "error: --group-by=speed: must be a setting of a run\n")


# the table and the picture


@pytest.fixture
def three(write):
    own = {"method": "dp-fedavg", "dp-fedavg.noise-multiplier": 1.0}
    return [
        write("a", [0.1, 0.5, 0.7], **own),
        write("b", [0.1, 0.4, 0.8], seed=1, statement=stated(epsilon=1.75), **own),
        write("c", [0.1, 0.6, 0.9], statement=stated(epsilon=4.0), **own | {"dp-fedavg.noise-multiplier": 0.5}),
        write("d_%", [0.1, 0.9], statement=NOT_PRIVATE, **own | {"dp-fedavg.noise-multiplier": 0.0}),
    ]


def test_json(three, call):
    status, out, err = call("compare", *three, "--format", "json", "--output", "x.svg")
    assert (status, err) == (0, "figure: x.svg\n")
    read = json.loads(out)
    first, second, third = read["curves"]
    assert (first["mean"], first["std"]) == (pytest.approx(0.75), pytest.approx(0.0707, abs=1e-4))
    assert [curve["largest_epsilon"] for curve in read["curves"]] == [1.75, 4.0, None]
    assert [curve["private"] for curve in read["curves"]] == [True, True, False]
    assert first["settings"] == {"dp-fedavg.noise-multiplier": 1.0}
    assert (first["runs"], second["std"], third["delta"]) == (three[:2], None, None)


def test_csv_and_latex(three, call):
    _, out, _ = call("compare", *three, "--format", "csv", "--output", "x.pdf")
    first, second, third = csv.DictReader(out.splitlines())
    assert (first["largest_epsilon"], second["largest_epsilon"], third["largest_epsilon"]) == ("1.75", "4.0", "")
    assert (first["dp-fedavg.noise-multiplier"], first["runs"], second["std"]) == ("1.0", "2", "")
    _, out, _ = call("compare", *three, "--format", "latex", "--label", "50 % & more_", "--label", "b", "--label", "c")
    assert out.splitlines() == [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{lrrrrlp{5cm}r}",
        "\\toprule",
        "curve & seeds & final accuracy (\\%) & epsilon (largest) & delta & protects & against & rounds \\\\",
        "\\midrule",
        "50 \\% \\& more\\_ & 2 & 75.00 $\\pm$ 7.07 & 1.750 & 0.001 & client, add-or-remove-one & outsiders & 2 \\\\",
        # As wide as the one above: digits are aligned.
        "b & 1 & 90.00\\phantom{ $\\pm$ 000.} & 4.000 & 0.001 & client, add-or-remove-one & outsiders & 2 \\\\",
        "c & 1 & 90.00\\phantom{ $\\pm$ 000.} & not private & - & - & - & 1 \\\\",
        "\\bottomrule",
        "\\end{tabular}",
    ]


def by_epsilon(write, *, epsilon, proved, accuracy, method="dp-fedavg", seed=0, **guarantee):
    own = {"method": method, f"{method}.epsilon": epsilon, "seed": seed}
    told = stated(epsilon=proved, private=proved is not None, **guarantee)
    return write(f"{method}-{epsilon}-{seed}", [0.1, accuracy], statement=told, **own)


def test_a_pivot_has_a_column_for_each_epsilon_and_a_row_for_each_guarantee(write, call):
    record = {"unit": "record", "relation": "replace-one", "protected_against": "the server"}
    folders = [
        by_epsilon(write, epsilon=2.0, proved=1.99999, accuracy=0.7),
        by_epsilon(write, epsilon=2.0, proved=2.0, accuracy=0.8, seed=1),
        by_epsilon(write, epsilon=8.0, proved=7.9, accuracy=0.9),
        by_epsilon(write, epsilon=2.0, proved=1.99, accuracy=0.3, method="nbafl", **record),
        # Nobody may read that this one had 8: its statement proves 8.00001 and no less.
        by_epsilon(write, epsilon=8.0, proved=8.00001, accuracy=0.4, method="nbafl", **record),
    ]
    status, out, _ = call("compare", *folders, "--pivot", "--format", "markdown")
    assert status == 0
    assert out.splitlines()[:4] == [
        "| final accuracy (%) | delta | protects | against | epsilon <= 2 | epsilon <= 8 | epsilon <= 8.001 |",
        "|---|---:|---|---|---:|---:|---:|",
        "| method=dp-fedavg | 0.001 | client, add-or-remove-one | outsiders | 75.00 ± 7.07 | 90.00 | - |",
        "| method=nbafl | 0.001 | record, replace-one | the server | 30.00 | - | 40.00 |",
    ]
    assert "protect different units" in out
    assert [tables.is_pivot(curves(*some)) for some in (folders, folders[:3], folders[2:4])] == [True, False, True]
    assert "epsilon $\\leq$ 2" in call("compare", *folders, "--pivot", "--format", "latex")[1]
    assert call("compare", *folders, "--pivot", "--format", "csv")[0] == 2


@pytest.mark.drawn
def test_the_table_as_text_and_a_picture_of_any_type(three, call, tmp_path):
    status, out, err = call("compare", *three, "--label", "first", "--label", "second", "--label", "弱强弱é", "--output", "x.pdf")
    assert out.splitlines() == [
        "curve   seeds  final accuracy (%)  epsilon (largest)  delta  protects                   against    rounds",
        "first       2       75.00 +- 7.07              1.750  0.001  client, add-or-remove-one  outsiders       2",
        "second      1       90.00                      4.000  0.001  client, add-or-remove-one  outsiders       2",
        "弱强弱é        1       90.00                not private      -  -                          -               1",
        "figure: x.pdf",
    ]
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("note: the figure has boxes in place of 弱 强, which matplotlib's font lacks; set font.family")
    content = (tmp_path / "x.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert b"/Type3" not in content  # which many journals refuse
    out = call("compare", *three, "--metric", "loss")[1]
    assert "1.500 +- 0.141" in out  # twice the accuracy, 0.75 +- 0.0707
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_tells_what_it_shows(three):
    drawn = figure(curves(*three), "accuracy")
    rounds, spent = drawn.axes
    assert [len(axes.containers) for axes in drawn.axes] == [3, 2]
    assert [one.has_yerr for one in rounds.containers] == [True, False, False]  # one run has no spread
    assert spent.containers[0].lines[0].get_xdata().tolist() == [0, 0.5, 1.0]
    assert spent.get_xlabel() == "epsilon spent (delta 0.001; client, add-or-remove-one)"
    assert "standard deviation" in drawn.get_suptitle()
    names = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert names[0] == "dp-fedavg.noise-multiplier=1\nepsilon 1.75, n = 2"
    assert names[2] == "dp-fedavg.noise-multiplier=0\nnot private, n = 1"


def test_the_last_metric_against_epsilon(three, call):
    drawn = against_epsilon(curves(*three), "accuracy")
    (axes,) = drawn.axes
    (line,) = axes.containers
    assert line.lines[0].get_xdata().tolist() == [1.75, 4.0]  # the table's: the largest over seeds
    assert line.lines[0].get_ydata().tolist() == pytest.approx([0.75, 0.9])
    assert axes.get_xlabel() == "epsilon of the whole run (delta 0.001; client, add-or-remove-one)"
    assert drawn.get_suptitle().endswith("epsilon: the largest of the n runs")
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
        "dp-fedavg, n = 1 to 2\nnot private",
        "dp-fedavg, n = 1 to 2",
    ]
    assert call("compare", *three, "--x-axis", "epsilon")[0] == 0
    status, _, err = call("compare", three[3], "--x-axis", "epsilon")
    assert (status, err) == (2, "error: --x-axis=epsilon: needs a private run; set --x-axis rounds\n")


# refusals


def test_bad_folders_are_named_in_one_line(write, call, tmp_path):
    good = write("good", [0.1, 0.5])
    torn = write("torn", [0.1])
    (tmp_path / "torn" / "statement.json").write_text("{")
    for arguments, named in [
        (["nowhere"], "nowhere: must be a run folder; it has no run-config.toml"),
        ([good, write("silent", [])], "silent: has no accuracy in metrics.jsonl"),
        ([good, torn], f"{torn}: can't be read"),
        ([good, write("unfinished", [0.1], statement=None)], "unfinished: the run was not finished (no model.safetensors)"),
        ([good, f"{good}/../good"], "good: is given twice"),
        ([good, write("later", [], lines=[line(7, 0.5, 1.0)], seed=1)], "later: has no accuracy of a round that"),
        ([good, "--output", "x.doc"], "--output=x.doc: must end in a type that matplotlib writes, such as "),
        ([good, "--output", "no/where.png"], "--output=no/where.png: can't be written"),
    ]:
        status, out, err = call("compare", *arguments)
        assert (status, out) == (2, ""), named
        assert err.count("\n") == 1
        assert named in err


def test_unfinished_runs_are_taken_if_asked_for(write, call):
    folder = write("a", [0.1, 0.5], statement=None)
    out = call("compare", folder, "--include-unfinished")[1]
    assert f"note: {folder}: not finished; its rounds so far are used" in out
    failed = write("c", [0.1, 0.5], finished=False)
    endless = write("b", [], lines=[line(0, 0.1, 0.0), line(1, 0.2, None)], statement=None)
    found = [curves(one, include_unfinished=True)[0].epsilon for one in (folder, failed, endless)]
    assert found == [0.5, GUARANTEE["epsilon"], math.inf]


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
