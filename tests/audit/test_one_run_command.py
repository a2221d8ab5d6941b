"""flower-dp audit PRESET --canaries N, as it is called."""

import json

import pytest

from flower_dp.audit.one_run import OneRunAudit
from flower_dp.cli import audits
from flower_dp.cli import main as cli
from flower_dp.core import noise

RUN = [
    *("audit", "breast-cancer", "--canaries", "300", "--canary-seed", "3"),
    *("--set", "method=dp-fedpaq", "--set", "partition=sample", "--set", "records-per-client=45", "--set", "batch-size=45"),
    *("--set", "num-rounds=1", "--set", "dp-fedpaq.num-local-steps=1", "--set", "dp-fedpaq.sensitivity=per-step"),
]


@pytest.fixture
def call(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.mark.slow
def test_a_correct_run_ends_with_status_0(call):
    code, out, _ = call(*RUN, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["claimed"] == pytest.approx(4.0, rel=1e-3)
    assert found["lower_bound"] <= found["claimed"]
    assert (found["unit"], found["num_canaries"], found["confidence"], found["refuted"]) == ("record", 300, 0.999, False)


def test_a_refuted_claim_ends_with_status_1(call, monkeypatch):
    """Of 400 canaries, that are in each other's way, 144 or 145 of 160 guesses are right with next to no noise: a bound of 1.7."""
    real = noise.gaussian
    monkeypatch.setattr(noise, "gaussian", lambda like, scale, step, rng: noise.nearest(real(like, scale, step, rng) / 200, step))
    code, out, _ = call(*RUN, "--canaries", "400", "--set", "dp-fedpaq.epsilon=1", "--confidence", "0.95")
    assert code == 1
    assert "VIOLATION: the run claims epsilon 1, and it is at least" in out
    assert "for each record (replace-one)" in out


def test_text_has_claim_bound_and_guesses():
    words = {"unit": "client", "relation": "add-or-remove-one", "sees": "all models"}
    numbers = {"num_canaries": 1000, "num_guesses": 100, "num_correct": 75, "confidence": 0.95, "delta": 1e-4}
    text = audits.text_of_run(OneRunAudit(claimed=4.0, **numbers, **words))
    assert "claimed epsilon   4 at delta 0.0001, for each client (add-or-remove-one)" in text
    assert "lower bound       0.673 with confidence 0.95" in text
    assert "75 of 100 right, about 1000 canaries" in text
    assert "VIOLATION" not in text
    # 100 guesses that are all right refute less than log(p / (1 - p)) = 3.49 with p^100 = 0.05, for delta is not 0.
    assert "TOO FEW" not in audits.text_of_run(OneRunAudit(claimed=3.2, **numbers, **words))
    assert "TOO FEW CANARIES: without any error they would prove epsilon >= 3.202 and no more" in text
    assert "infinite: not private" in audits.text_of_run(OneRunAudit(claimed=float("inf"), **numbers, **words))
    assert "VIOLATION" in audits.text_of_run(OneRunAudit(claimed=0.5, **numbers, **words))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["audit", "mnist-dp-fedavg", "--canary-seed", "1"], "--canary-seed: belongs to --canaries"),
        (["audit", "mnist-dp-fedavg", "--canaries", "10", "--plot", "a.png"], "--plot: does not go with --canaries"),
        (["audit", "breast-cancer", "--canaries", "1"], "--canaries"),
        (["audit", "no-such-preset", "--canaries", "10"], "no-such-preset"),
        (["audit", "mnist-dp-fedavg", "--canaries", "10", "--confidence", "2"], "confidence"),
    ],
)
def test_bad_options_end_with_status_2(call, arguments, said):
    code, _, err = call(*arguments)
    assert code == 2
    assert said in err
