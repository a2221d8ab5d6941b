"""flower-dp audit: exit status, text, JSON and figure."""

import json
import math
import re

import pytest

from flower_dp.audit.one_run import OneRunAudit
from flower_dp.cli import audits
from flower_dp.core import noise
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
        ((), "--all: is missing; or name a method, a case or a preset"),
        (("dp-fedavg", "--all"), "--all: can't be combined with dp-fedavg"),
        (("nonsense",), "nonsense: is not a method that has cases, nor a case; "),
        (("dp-fedavg", "--trials", "5"), "'--trials'"),
        (("dp-fedavg", "--confidence", "1"), "--confidence=1"),
        (("dp-fedavg", "--set", "num-rounds=3"), "--set: needs a preset"),
        (("dp-fedavg", "--plot", "it.mp3"), "--plot=it.mp3: must end in"),
        (("mnist-fedavg-not-private",), "is not private"),
        (("mnist-dp-fedavg", "--canary-seed", "1"), "--canary-seed: needs --canaries"),
        (("mnist-dp-fedavg", "--canaries", "10", "--plot", "a.png"), "--plot: can't be combined with --canaries"),
        (("no-such-preset", "--canaries", "10"), "no-such-preset"),
    ],
)
def test_bad_input_is_status_2(call, arguments, message):
    status, _, err = call("audit", *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


# One run


def test_a_run_whose_canaries_refute_its_claim_ends_with_status_1(call, monkeypatch):
    """Of 400 canaries, that are in each other's way, 144 or 145 of 160 guesses are right with next to no noise: a bound of 1.7."""
    real = noise.gaussian
    monkeypatch.setattr(
        noise, "gaussian", lambda like, scale, step, rng: noise.round_to_nearest(real(like, scale, step, rng) / 200, step)
    )
    settings = ["method=dp-fedpaq", "partition=sample", "records-per-client=45", "batch-size=45", "num-rounds=1"]
    settings += ["dp-fedpaq.num-local-steps=1", "dp-fedpaq.sensitivity=per-step", "dp-fedpaq.epsilon=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    status, out, _ = call("audit", "breast-cancer", "--canaries", "400", "--canary-seed", "3", "--confidence", "0.95", *words)
    assert status == 1
    assert "VIOLATION: the run claims epsilon 1, and it is at least" in out
    assert "for each record (replace-one)" in out


def test_the_text_of_one_run_has_claim_bound_and_guesses():
    words = {"unit": "client", "relation": "add-or-remove-one", "sees": "all models"}
    numbers = {"num_canaries": 1000, "num_guesses": 100, "num_correct": 75, "confidence": 0.95, "delta": 1e-4}
    text, high, low = (audits.text_of_run(OneRunAudit(claimed=claimed, **numbers, **words)) for claimed in (4.0, math.inf, 0.5))
    assert "claimed epsilon   4 at delta 0.0001, for each client (add-or-remove-one)" in text
    assert "lower bound       0.673 with confidence 0.95" in text
    assert "75 of 100 right, about 1000 canaries" in text
    # 100 guesses that are all right refute less than log(p / (1 - p)) = 3.49 with p^100 = 0.05, for delta is not 0.
    assert "TOO FEW CANARIES: without any error they would prove epsilon >= 3.202 and no more" in text
    assert ["VIOLATION" in one for one in (text, high, low)] == [False, False, True]
    assert "infinite: not private" in high
