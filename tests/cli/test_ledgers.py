"""flower-dp ledger show | create-device | create-server."""

import json
import math
from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.privacy import accounting
from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.mechanisms import Gaussian, Laplace
from flower_dp.privacy.store import Store
from tests.privacy.test_device_store import pay, terms
from tests.privacy.test_store import charge, local


@pytest.fixture
def says(call):
    return lambda *arguments: call("ledger", "show", *map(str, arguments))


@pytest.fixture
def creates(call):
    return lambda kind, *arguments: call("ledger", f"create-{kind}", *map(str, arguments))


def test_a_ledger_is_created_and_shown(says, creates, tmp_path):
    path = tmp_path / "device.sqlite"
    shown = "hospital-7: no reply yet, no terms\nhospital-8: no reply yet, no terms\n"
    assert creates("device", path, "hospital-7", "hospital-8") == says(path) == (0, shown, "")
    assert creates("device", path, "hospital-7") == (2, "", f"error: ledger {path}: exists already\n")
    assert list(DeviceLedger(path).read()) == ["hospital-7", "hospital-8"]


def test_a_devices_ledger_says_what_replies_cost_and_training_and_evaluations_add_up(says, tmp_path):
    path = tmp_path / "device.sqlite"
    DeviceLedger.create(path, ["both", "open", "unused"])
    pure, gaussian = Laplace(noise_multiplier=4.0), Gaussian(noise_multiplier=2.0)
    asked = {"both": gaussian, "both, evaluation": pure, "open": Gaussian(noise_multiplier=0.0), "open, evaluation": pure}
    for _ in range(2):
        pay(path, {name: terms(mechanism=mechanism) for name, mechanism in asked.items()})
    answer = json.loads(says(path, "--json")[1], parse_constant=pytest.fail)
    shown = {name: (one["epsilon"], one["delta"], one["replies"], one["num_replies"]) for name, one in answer["clients"].items()}
    # Pure: 2 x 1/4. Two Gaussian releases of 2.0: 2.9400 at 1e-5, as in the ledger's own example. No noise: no bound.
    assert shown["both"] == (pytest.approx(2.94, abs=5e-3), 1e-5, 2, 3)
    assert shown["both, evaluation"] == (pytest.approx(0.5), 0.0, 2, 3)
    assert (shown["open"][0], shown["unused"][0]) == (None, 0.0)
    # The delta is that of training: evaluations have none.
    total = pytest.approx(shown["both"][0] + 0.5)
    assert answer["totals"]["both"] == {"epsilon": total, "delta": 1e-5, "relation": "add-or-remove-one"}
    assert (answer["totals"]["open"]["epsilon"], set(answer["totals"])) == (None, {"both", "open"})
    out = says(path, "--delta", "1e-3")[1]
    assert "both, evaluation: 2 of 3 replies, epsilon 0.5000 at delta 0 (add-or-remove-one)\n  terms: 3 replies, Laplace" in out
    assert "both: 2 of 3 replies, epsilon 2.0" in out
    assert "open, in total: epsilon infinite: not private at delta 0.001 (add-or-remove-one)" in out


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
TOGETHER = "budget of all runs together: epsilon 8 at delta 1e-05"
ADAPTIVE = f"{TOGETHER}, however the settings of a run are chosen (fully adaptive)"


@pytest.mark.parametrize(
    ("arguments", "budget", "told"),
    [
        ((), None, ""),
        (BUDGET, {}, f"{TOGETHER}\n"),
        ((*BUDGET, "--fully-adaptive"), {"fully_adaptive": True}, f"{ADAPTIVE}\n"),
        ((*BUDGET, "--fully-adaptive", "--renyi-order", "3.3"), {"fully_adaptive": True, "renyi_order": 3.3}, f"{ADAPTIVE}\n"),
    ],
)
def test_a_servers_ledger_is_created_with_a_budget_of_all_runs(says, creates, path, arguments, budget, told):
    assert creates("server", path, *arguments) == says(path) == (0, f"no run yet\n{told}", "")
    assert Store(path).budget == (None if budget is None else LedgerBudget(epsilon=8.0, delta=1e-5, **budget))
    assert creates("server", path) == (2, "", f"error: ledger {path}: exists already\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--budget", "8"], "--budget: needs --delta"),
        (["--delta", "1e-5"], "--delta: needs --budget"),
        (["--fully-adaptive"], "--fully-adaptive: needs --budget"),
        ([*BUDGET, "--renyi-order", "3"], "--renyi-order: needs --fully-adaptive"),
        ([*BUDGET, "--fully-adaptive", "--renyi-order", "1.01"], "--renyi-order=1.01: is above 1024, or"),
        (["--budget", "8", "--delta", "0"], "--delta=0.0: must be"),
    ],
)
def test_what_makes_no_sense_is_refused_and_creates_nothing(creates, path, arguments, why):
    status, out, err = creates("server", path, *arguments)
    assert (status, out) == (2, "")
    assert why in err
    assert list(path.parent.iterdir()) == []


def test_a_ledger_that_does_not_exist_and_one_without_clients_are_refused(says, creates, path):
    for status, out, err in (says(path), creates("device", path)):
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
    assert f"does not exist; create it with `flower-dp ledger create-server {path}`" in says(path)[2]
    assert list(path.parent.iterdir()) == []


def test_all_runs_and_clients_and_their_joint_epsilon_are_shown(says, path):
    Store.create(path)
    charges(path, [local(), local()], [local(owners=("b", "c"), event=GaussianDpEvent(3.0))], [charge()])
    status, out, _ = says(path)
    assert status == 0
    lines = out.splitlines()
    shown = [f"{math.ceil(gaussian(*one) * 1e4) / 1e4:.4f}" for one in ((2, 2), (3,), (2, 2, 3))]
    assert lines[0].endswith(f"2 x dp-pasgd; epsilon {shown[0]} (record, replace-one)")
    assert f"epsilon {shown[1]} (record, replace-one)" in lines[1]
    assert lines[3:6] == [f"  b: epsilon {shown[2]}", f"  a: epsilon {shown[0]}", f"  c: epsilon {shown[1]}"]
    assert lines[6].startswith(f"all 2 runs together (record, replace-one): epsilon {shown[2]} at delta 0.001, accountant")
    assert lines[9] == "costs of different units or relations are apart: no accountant adds them up"
    status, out, _ = says(path, "--json", "--delta", 1e-3)
    told = json.loads(out)
    joint = {"unit": "record", "relation": "replace-one", "accountant": "gaussian-exact", "runs": 2}
    assert told["joint"][0] == joint | {"epsilon": pytest.approx(gaussian(2, 2, 3))}
    assert [one["charges"] for one in told["runs"].values()] == [{"dp-pasgd": 2}, {"dp-pasgd": 1}, {"dp-fedavg": 1}]
    assert set(told["clients"]) == {"a", "b", "c", "every client"}
    assert told["clients"]["b"][0]["epsilon"] == pytest.approx(gaussian(2, 2, 3))


@pytest.mark.parametrize(
    ("budget", "arguments", "delta"), [(1e-3, (), 1e-3), (1e-3, ("--delta", "1e-6"), 1e-6), (None, (), 1e-4)]
)
def test_the_delta_is_the_given_one_or_that_of_the_budget_or_the_least_of_the_runs(says, path, budget, arguments, delta):
    Store.create(path, budget and LedgerBudget(epsilon=100.0, delta=budget))
    with Store(path) as ledger:
        ledger.append(ledger.begin(method="m", delta=1e-4), charge())
        ledger.begin(method="pure", delta=0.0)
    told = json.loads(says(path, "--json", *arguments)[1])
    expected = accounting.epsilon(GaussianDpEvent(2.0), delta=delta, relation="add-or-remove-one").epsilon
    assert (told["delta"], told["joint"][0]["epsilon"]) == (delta, pytest.approx(expected))


def test_a_run_with_a_fixed_seed_is_told(says, path):
    Store.create(path)
    with Store(path) as ledger:
        ledger.append(ledger.begin(method="m", delta=1e-3, private=False), charge())
    assert ", noise from a fixed seed: 1 x dp-fedavg; epsilon infinite: not private" in says(path)[1]
    assert json.loads(says(path, "--json")[1])["joint"][0]["epsilon"] is None


def test_the_folder_of_a_run_stands_for_its_ledger(says, path):
    folder = path.parent / "run" / "checkpoint"
    folder.mkdir(parents=True, mode=0o700)
    Store.create(folder / "ledger.sqlite")
    for place in (path.parent / "run", folder, folder / "ledger.sqlite"):
        assert says(place)[:2] == (0, "no run yet\n")
    status, out, err = says(path.parent)
    assert (status, out) == (2, "")
    assert "is a folder without a ledger: must have ledger.sqlite or checkpoint/ledger.sqlite" in err


def test_of_many_clients_those_who_were_charged_most_are_shown(says, path):
    Store.create(path)
    charges(path, [local(owners=tuple(f"c{number:02d}" for number in range(30))), local(owners=("c29",))])
    lines = says(path)[1].splitlines()
    assert lines[1].startswith("  c29: epsilon ")
    assert lines[2].startswith("  c00: epsilon ")
    assert lines[21] == "  and 10 others, with no more; --json has all"
    assert len(json.loads(says(path, "--json")[1])["clients"]) == 30
