"""flower-dp audit: exit status, text, JSON and figure."""

import json
import re

import pytest

from flower_dp.strategies.releases import limits

QUICK = ("--trials", "40")


def test_a_case_is_audited_and_drawn_and_too_few_trials_are_told(call, tmp_path):
    status, out, _ = call("audit", "dp-fedavg, stock clients", "--trials", "20", "--plot", str(tmp_path / "it.png"))
    assert status == 0
    assert "dp-fedavg, stock clients  0.001" in out
    assert "20 runs without the unit and 20 with it; each bound with confidence 0.999" in out
    assert "TOO FEW TRIALS: dp-fedavg, stock clients: without any error they would prove epsilon >= 3.395 and no more" in out
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_all_cases_of_a_method_as_json(call):
    status, out, err = call("audit", "scaffold", *QUICK, "--confidence", "0.99", "--json")
    found, other = map(json.loads, out.splitlines())
    assert status == 0
    assert other["case"] == "scaffold, per-step"
    for line, one in zip(err.splitlines(), (found, other), strict=True):  # no terminal: a line a case
        assert re.fullmatch(rf"{one['case']}: 40 trials; all cases in about \d+:\d\d", line)
    assert found["audited"] <= found["largest"]
    assert found["largest"] > found["claimed"]
    assert (found["case"], found["trials"], found["tested"], found["confidence"]) == ("scaffold, two rounds", 40, 30, 0.99)
    assert found["claimed"] == pytest.approx(8, rel=1e-3)
    assert found["ratio"] == pytest.approx(found["audited"] / found["claimed"])
    assert found["violation"] is False


def test_a_violation_is_status_1(call, monkeypatch):
    monkeypatch.setattr(limits, "_clipped", lambda vector, bound: vector)
    status, out, _ = call("audit", "dp-fedavg, stock clients", "--trials", "100")
    assert status == 1
    assert "VIOLATION: dp-fedavg, stock clients: claims epsilon 10.2" in out
    assert "TOO FEW" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--all: or a method, case or preset is missing"),
        (("dp-fedavg", "--all"), "--all: belongs to no case"),
        (("nonsense",), "nonsense: is no method (dp-fedavg, "),
        (("dp-fedavg", "--trials", "5"), "'--trials'"),
        (("dp-fedavg", "--confidence", "1"), "--confidence=1"),
        (("dp-fedavg", "--set", "num-rounds=3"), "--set: belongs to a preset"),
        (("dp-fedavg", "--plot", "it.mp3"), "--plot=it.mp3: must end in"),
        (("mnist-fedavg-not-private",), "is not private"),
    ],
)
def test_bad_input_is_status_2(call, arguments, message):
    status, _, err = call("audit", *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
