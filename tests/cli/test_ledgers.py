"""flower-dp ledger."""

import json

import pytest

from flower_dp.cli import main as cli
from flower_dp.privacy.ledger_file import LedgerFile
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from tests.privacy.test_ledger_file import terms


@pytest.fixture
def call(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["ledger", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_ledger_is_created_and_shown(call, tmp_path):
    path = tmp_path / "ledger.json"
    assert call(path, "--create", "hospital-7", "--create", "hospital-8") == (
        0,
        "hospital-7: no reply yet, no terms\nhospital-8: no reply yet, no terms\n",
        "",
    )
    status, out, err = call(path, "--create", "hospital-7")
    assert (status, out, err) == (2, "", f"error: ledger {path}: File exists\n")
    assert list(LedgerFile(path).read()) == ["hospital-7", "hospital-8"]


def test_what_was_spent_is_what_the_replies_cost(call, tmp_path):
    path = tmp_path / "ledger.json"
    ledger = LedgerFile.create(path, ["pure", "approximate", "open", "unused"])
    for _ in range(2):
        ledger.charge(
            {
                "pure": terms(mechanism=Laplace(noise_multiplier=4.0)),
                "approximate": terms(mechanism=Gaussian(noise_multiplier=2.0)),
                "open": terms(mechanism=Gaussian(noise_multiplier=0.0)),
            }
        )
    status, out, _ = call(path, "--json")
    answer = json.loads(out, parse_constant=pytest.fail)["clients"]
    assert status == 0
    # Pure: 2 x 1/4. Two Gaussian releases of 2.0: 2.9400 at 1e-5, as in the ledger's own example. No noise: no bound.
    assert (answer["pure"]["epsilon"], answer["pure"]["delta"]) == (pytest.approx(0.5), 0.0)
    assert (answer["approximate"]["epsilon"], answer["approximate"]["delta"]) == (pytest.approx(2.94, abs=5e-3), 1e-5)
    assert answer["open"]["epsilon"] is None
    assert (answer["unused"]["epsilon"], answer["unused"]["replies"]) == (0.0, 0)
    assert (answer["pure"]["replies"], answer["pure"]["num_replies"]) == (2, 3)
    _, out, _ = call(path, "--delta", "1e-3")
    assert out.startswith("pure: 2 of 3 replies, epsilon 0.5000 at delta 0 (add-or-remove-one)\n  terms: 3 replies, Laplace")
    assert "approximate: 2 of 3 replies, epsilon 2.0" in out
    assert "open: 2 of 3 replies, epsilon infinite: not private at delta 0.001" in out


def test_training_and_evaluations_add_up(call, tmp_path):
    path = tmp_path / "ledger.json"
    names = ["both", "both, evaluation", "other", "other, evaluation", "one", "one, evaluation"]
    ledger = LedgerFile.create(path, names)
    pure, gaussian = Laplace(noise_multiplier=4.0), Gaussian(noise_multiplier=2.0)
    asked = {"both": gaussian, "both, evaluation": pure, "other": Gaussian(noise_multiplier=0.0), "other, evaluation": pure}
    ledger.charge({name: terms(mechanism=mechanism) for name, mechanism in (asked | {"one": pure}).items()})
    answer = json.loads(call(path, "--json")[1], parse_constant=pytest.fail)
    training, evaluation = (answer["clients"][name]["epsilon"] for name in names[:2])
    assert evaluation == pytest.approx(0.25)
    # The delta is that of training: evaluations have none.
    assert answer["totals"]["both"] == {"epsilon": training + evaluation, "delta": 1e-5, "relation": "add-or-remove-one"}
    assert answer["totals"]["other"]["epsilon"] is None
    assert set(answer["totals"]) == {"both", "other"}
    lines = call(path)[1].splitlines()
    assert f"both, in total: epsilon {training + evaluation:.4f} at delta 1e-05 (add-or-remove-one)" in lines
    assert "other, in total: epsilon infinite: not private at delta 1e-05 (add-or-remove-one)" in lines


def test_a_file_that_is_no_ledger_and_a_bad_delta(call, tmp_path):
    path = tmp_path / "ledger.json"
    path.write_text("{}")
    assert call(path)[2].startswith(f"error: ledger {path}: is damaged, or no ledger (KeyError")
    assert call(tmp_path / "none")[0] == 2
    assert "--delta=1" in call(path, "--delta", "1")[2]
