"""flower-dp audit PRESET --canaries N, as it is called."""

import json

import pytest

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
