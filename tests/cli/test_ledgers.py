"""flower-dp ledger."""

import json
import math
from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.cli import main as cli
from flower_dp.privacy import accounting
from flower_dp.privacy.budget import JointBudget
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.privacy.store import Store
from tests.privacy.test_device_store import pay, terms
from tests.privacy.test_store import charge, local


@pytest.fixture
def call(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["ledger", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def test_a_ledger_is_created_and_shown(call, tmp_path):
    path = tmp_path / "device.sqlite"
    assert call(path, "--create", "hospital-7", "--create", "hospital-8") == (
        0,
        "hospital-7: no reply yet, no terms\nhospital-8: no reply yet, no terms\n",
        "",
    )
    status, out, err = call(path, "--create", "hospital-7")
    assert (status, out, err) == (2, "", f"error: ledger {path}: exists already\n")
    assert list(DeviceLedger(path).read()) == ["hospital-7", "hospital-8"]


def test_what_was_spent_is_what_the_replies_cost(call, tmp_path):
    path = tmp_path / "device.sqlite"
    DeviceLedger.create(path, ["pure", "approximate", "open", "unused"])
    for _ in range(2):
        pay(
            path,
            {
                "pure": terms(mechanism=Laplace(noise_multiplier=4.0)),
                "approximate": terms(mechanism=Gaussian(noise_multiplier=2.0)),
                "open": terms(mechanism=Gaussian(noise_multiplier=0.0)),
            },
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
    path = tmp_path / "device.sqlite"
    names = ["both", "both, evaluation"]
    DeviceLedger.create(path, ["both", "other", "one"])
    pure, gaussian = Laplace(noise_multiplier=4.0), Gaussian(noise_multiplier=2.0)
    asked = {"both": gaussian, "both, evaluation": pure, "other": Gaussian(noise_multiplier=0.0), "other, evaluation": pure}
    pay(path, {name: terms(mechanism=mechanism) for name, mechanism in (asked | {"one": pure}).items()})
    answer = json.loads(call(path, "--json")[1], parse_constant=pytest.fail)
    training, evaluation = (answer["clients"][name]["epsilon"] for name in names)
    assert evaluation == pytest.approx(0.25)
    # The delta is that of training: evaluations have none.
    assert answer["totals"]["both"] == {"epsilon": training + evaluation, "delta": 1e-5, "relation": "add-or-remove-one"}
    assert answer["totals"]["other"]["epsilon"] is None
    assert set(answer["totals"]) == {"both", "other"}
    lines = call(path)[1].splitlines()
    assert f"both, in total: epsilon {training + evaluation:.4f} at delta 1e-05 (add-or-remove-one)" in lines
    assert "other, in total: epsilon infinite: not private at delta 1e-05 (add-or-remove-one)" in lines


def test_a_file_that_is_no_ledger_and_a_bad_delta(call, tmp_path):
    path = tmp_path / "device.sqlite"
    path.write_text("{}")
    assert call(path)[2] == f"error: ledger {path}: file is not a database\n"
    assert call(tmp_path / "none")[0] == 2
    assert "--delta=1" in call(path, "--delta", "1")[2]


# A server's ledger


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "ledger.sqlite"


def charges(path, *runs):
    with Store(path) as ledger:
        for made in runs:
            run = ledger.begin(method=f"method of {len(made)}", delta=1e-3)
            for number, one in enumerate(made, start=1):
                ledger.append(run, replace(one, number=number, server_round=number))


def gaussian(*multipliers):
    together = GaussianDpEvent(1 / math.sqrt(sum(one**-2 for one in multipliers)))
    return accounting.epsilon(together, delta=1e-3, relation="replace-one").epsilon


BUDGET = ("--budget", "8", "--delta", "1e-5")


def test_a_servers_ledger_is_created_with_a_budget_of_all_runs(call, path):
    assert call(path, "--create-server", "--budget", 8, "--delta", 1e-6) == (
        0,
        "no run yet\nbudget of all runs together: epsilon 8 at delta 1e-06\n",
        "",
    )
    status, out, err = call(path, "--create-server")
    assert (status, out, err) == (2, "", f"error: ledger {path}: exists already\n")
    with Store(path) as ledger:
        assert ledger.budget == JointBudget(epsilon=8.0, delta=1e-6)
    adaptive = ("--create-server", "--budget", 8, "--delta", 1e-6, "--fully-adaptive")
    status, out, _ = call(path.with_name("adaptive"), *adaptive)
    assert (status, out.splitlines()[-1]) == (
        0,
        "budget of all runs together: epsilon 8 at delta 1e-06, whatever decides the settings of a run (fully adaptive)",
    )
    with Store(path.with_name("adaptive")) as ledger:
        assert ledger.budget == JointBudget(epsilon=8.0, delta=1e-6, fully_adaptive=True)
    assert call(path.with_name("chosen"), *adaptive, "--renyi-order", 3.3)[0] == 0
    with Store(path.with_name("chosen")) as ledger:
        assert ledger.budget == JointBudget(epsilon=8.0, delta=1e-6, fully_adaptive=True, renyi_order=3.3)
    assert call(path.with_name("other"), "--create-server")[:2] == (0, "no run yet\n")
    assert Store(path.with_name("other")).budget is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--create-server", "--budget", "8"], "--delta: a budget has no meaning without it"),
        (["--budget", "8"], "--budget: is of a server's ledger; add --create-server"),
        (["--create-server", "--fully-adaptive"], "--fully-adaptive: is of a budget; add --budget"),
        (["--fully-adaptive"], "--fully-adaptive: is of a server's ledger; add --create-server"),
        (
            ["--create-server", *BUDGET, "--renyi-order", "3"],
            "--renyi-order: is of a fully adaptive budget; add --fully-adaptive",
        ),
        (["--create-server", *BUDGET, "--fully-adaptive", "--renyi-order", "1"], "renyi_order=1.0: must be a finite number > 1"),
        (
            ["--create-server", *BUDGET, "--fully-adaptive", "--renyi-order", "1.01"],
            "--renyi-order=1.01: is above 1024, or nothing fits into epsilon 8 at delta 1e-05",
        ),
        (["--create-server", "--create", "a"], "--create: is of a device's ledger"),
        ([], "does not exist; create it with `flower-dp ledger "),
    ],
)
def test_what_makes_no_sense_is_refused_and_creates_nothing(call, path, arguments, why):
    status, out, err = call(path, *arguments)
    assert (status, out) == (2, "")
    assert why in err
    assert list(path.parent.iterdir()) == []


def test_all_runs_and_clients_and_their_joint_epsilon_are_shown(call, path):
    Store.create(path)
    charges(path, [local(), local()], [local(owners=("b", "c"), event=GaussianDpEvent(3.0))], [charge()])
    status, out, _ = call(path)
    assert status == 0
    lines = out.splitlines()
    shown = [f"{math.ceil(gaussian(*one) * 1e4) / 1e4:.4f}" for one in ((2, 2), (3,), (2, 2, 3))]
    assert lines[0].startswith("run ")
    assert lines[0].endswith(f"2 x dp-pasgd; epsilon {shown[0]} (record, replace-one)")
    assert f"epsilon {shown[1]} (record, replace-one)" in lines[1]
    assert "method of 1" in lines[2]
    assert lines[3:6] == [f"  b: epsilon {shown[2]}", f"  a: epsilon {shown[0]}", f"  c: epsilon {shown[1]}"]
    assert lines[6].startswith(f"all 2 runs together (record, replace-one): epsilon {shown[2]} at delta 0.001, accountant")
    assert lines[7].startswith("  every client: epsilon ")
    assert lines[8].startswith("one run (client, add-or-remove-one): epsilon ")
    assert lines[9] == "no accountant adds up costs of different units or relations: they are apart"
    status, out, _ = call(path, "--json", "--delta", 1e-3)
    told = json.loads(out)
    assert told["joint"][0] == {
        "unit": "record",
        "relation": "replace-one",
        "epsilon": pytest.approx(gaussian(2, 2, 3)),
        "accountant": "gaussian-exact",
        "runs": 2,
    }
    assert [one["charges"] for one in told["runs"].values()] == [{"dp-pasgd": 2}, {"dp-pasgd": 1}, {"dp-fedavg": 1}]
    assert set(told["clients"]) == {"a", "b", "c", "every client"}
    assert told["clients"]["b"][0]["epsilon"] == pytest.approx(gaussian(2, 2, 3))


def test_the_delta_is_that_of_the_budget_unless_another_is_given(call, path):
    Store.create(path, JointBudget(epsilon=100.0, delta=1e-3))
    charges(path, [charge()])
    for arguments, delta in (((), 1e-3), (("--delta", "1e-6"), 1e-6)):
        told = json.loads(call(path, "--json", *arguments)[1])
        expected = accounting.epsilon(GaussianDpEvent(2.0), delta=delta, relation="add-or-remove-one").epsilon
        assert (told["delta"], told["joint"][0]["epsilon"]) == (delta, pytest.approx(expected))


def test_without_a_budget_the_delta_is_the_least_of_the_runs(call, path):
    Store.create(path)
    assert json.loads(call(path, "--json")[1])["delta"] == 1e-5
    with Store(path) as ledger:
        for delta in (1e-3, 1e-4, 0.0):  # 0: a pure method
            ledger.append(ledger.begin(method="m", delta=delta), charge())
    told = json.loads(call(path, "--json")[1])
    expected = accounting.epsilon(GaussianDpEvent(2.0), delta=1e-4, relation="add-or-remove-one").epsilon
    assert told["delta"] == 1e-4
    assert next(iter(told["runs"].values()))["epsilon"][0]["epsilon"] == pytest.approx(expected)


def test_the_folder_of_a_run_stands_for_its_ledger(call, path):
    folder = path.parent / "run" / "checkpoint"
    folder.mkdir(parents=True, mode=0o700)
    Store.create(folder / "ledger.sqlite")
    for place in (path.parent / "run", folder, folder / "ledger.sqlite"):
        assert call(place)[:2] == (0, "no run yet\n")
    status, out, err = call(path.parent)
    assert (status, out) == (2, "")
    assert "is a folder without a ledger: must have ledger.sqlite or checkpoint/ledger.sqlite" in err


def test_of_many_clients_those_who_were_charged_most_are_shown(call, path):
    Store.create(path)
    charges(path, [local(owners=tuple(f"c{number:02d}" for number in range(30))), local(owners=("c29",))])
    lines = call(path)[1].splitlines()
    assert lines[1].startswith("  c29: epsilon ")
    assert lines[2].startswith("  c00: epsilon ")
    assert lines[21] == "  and 10 others, with less: --json has all"
    assert len(json.loads(call(path, "--json")[1])["clients"]) == 30


def test_a_run_with_a_fixed_seed_is_told(call, path):
    Store.create(path)
    with Store(path) as ledger:
        ledger.append(ledger.begin(method="m", delta=1e-3, private=False), charge())
    out = call(path)[1]
    assert ", noise from a fixed seed: 1 x dp-fedavg; epsilon infinite: not private" in out
    assert json.loads(call(path, "--json")[1])["joint"][0]["epsilon"] is None


def test_a_damaged_server_ledger_is_an_error(call, path):
    Store.create(path)
    path.write_bytes(path.read_bytes()[:5000])
    status, out, err = call(path)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: ledger {path}: ")
