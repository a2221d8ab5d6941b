"""The norms of client updates before the clip: what a run records on request, the figure, and the command."""

import numpy as np
import pytest

from flower_dp.reporting.past_run import read_past_run
from flower_dp.reporting.update_norms import figure, in_words, read_update_norms
from tests.app_runs import play


@pytest.fixture
def norms_of(write):
    """Write a run's folder, and return the norms that are read from it."""

    def read(name, *lines):
        rows = [{"round": at} | line for at, line in enumerate(lines)]
        statement = {"format": 2, "mechanism": {"noise": {"clip_norm": 0.5}}}
        return read_update_norms(read_past_run(write(name, [], lines=rows, statement=statement)))

    return read


def answer(*norms):
    """The line of a round whose clients have these norms."""
    return {"client-update-norm": np.mean(norms), "client-update-norm-squared": np.mean(np.square(norms))}


def test_mean_and_spread_of_every_round_that_told_them(norms_of):
    norms = norms_of("run", {}, answer(1.0, 3.0), {}, answer(2.0, 2.0, 5.0))
    assert norms.rounds.tolist() == [1, 3]
    assert norms.mean == pytest.approx([2.0, 3.0])
    assert norms.std == pytest.approx([1.0, 2.0**0.5])
    assert (norms.clip_rounds.tolist(), norms.clip_norms.tolist()) == ([1, 3], [0.5, 0.5])
    assert in_words(norms) == "mean norm before the clip 3 in round 3, 2 to 3 in all; clip norm 0.5"
    (axes,) = figure(norms, "dp-fedavg").axes
    mean, clip = axes.lines
    assert mean.get_ydata() == pytest.approx([2.0, 3.0])
    assert clip.get_ydata().tolist() == [0.5, 0.5]
    assert "NOT PRIVATE" in axes.get_title()
    assert axes.get_yscale() == "linear"


def test_a_clip_norm_that_moves_is_that_of_the_rounds(norms_of):
    lines = [{"clip-norm": 100.0} | answer(1.0, 1.5), {"clip-norm": 10.0} | answer(1.0), {"clip-norm": 1.0} | answer(1.0)]
    norms = norms_of("run", *lines)
    assert norms.clip_norms.tolist() == [100.0, 10.0, 1.0]
    (axes,) = figure(norms, "x").axes
    assert axes.get_yscale() == "log"
    alone = norms_of("alone", {"clip-norm": 2.0}, {"clip-norm": 1.0})
    assert (alone.rounds.size, alone.clip_norms.tolist()) == (0, [2.0, 1.0])
    assert in_words(alone) == "clip norm 1"
    (axes,) = figure(alone, "x").axes
    assert "NOT PRIVATE" not in axes.get_title()


@pytest.mark.slow
def test_a_run_of_the_app_tells_them_on_request_alone(tmp_path, call):
    method = "dp-fedsam"
    keywords = {"task": "breast-cancer", "method": method, "num-clients": 4, "num-rounds": 2, "sampling": "full"}
    keywords |= {f"{method}.delta": 1e-3, f"{method}.target-epsilon": 0.0, "test-every": 0, "training-engine": "one-by-one"}
    silent = play(tmp_path / "silent", keywords)
    status, _, err = call("figure", "update-norms", str(silent))
    assert (status, "silent: has no norms of updates; run it again with --set report-client-metrics=true" in err) == (2, True)
    assert "client-" not in (silent / "metrics.jsonl").read_text()
    assert "CLIENT METRICS" not in (silent / "statement.txt").read_text()
    folder = play(tmp_path / "told", {**keywords, "report-client-metrics": True})
    assert "they include the norms of clients' updates before the clip" in " ".join(
        (folder / "statement.txt").read_text().split()
    )
    norms = read_update_norms(read_past_run(folder))
    assert norms.rounds.tolist() == [1, 2]
    assert norms.clip_norms.tolist() == [0.5, 0.5]
    assert (norms.mean > 0).all()
    status, out, _ = call("figure", "update-norms", str(folder), "--output", str(tmp_path / "norms.png"))
    assert (status, out[:26]) == (0, "mean norm before the clip ")
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
