"""What a sweep's runs cost together: against closed forms, for clients that nobody can tell apart from run to run."""

import json
import math

import dp_accounting as dp
import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent

from flower_dp.privacy.charges import ALL_CLIENTS, CostScope
from flower_dp.privacy.store import Store
from flower_dp.sweeps.cost import RunCharges, compose, statement_of
from tests.charges import charge_each

ONE = GaussianDpEvent(3.0)
CLIENT = CostScope(unit="client", relation="add-or-remove-one")
RECORD = CostScope(unit="record", relation="replace-one")


def charge(number, owners=(ALL_CLIENTS,), events=(ONE,), scope=CLIENT):
    words = {"release": scope.unit, "number": number, "server_round": number, "fingerprint": "b", "scope": scope}
    return charge_each(dict(zip(owners, events, strict=True)), **words)


def charged(*histories):
    return RunCharges(histories=histories, private=True)


@pytest.fixture
def run(tmp_path):
    """Write the ledger of a run, and return the run's folder."""

    def written(name, *charges, private=True, delta=1e-3):
        place = tmp_path / name / "checkpoint"
        place.mkdir(parents=True, mode=0o700)
        place.chmod(0o700)
        Store.create(place / "ledger.sqlite")
        with Store(place / "ledger.sqlite") as ledger:
            run = ledger.begin(method="DP-FedAvg", delta=delta, private=private)
            for one in charges:
                ledger.append(run, one)
        return tmp_path / name

    return written


def gaussian(multiplier, count, delta):
    return dp.get_epsilon_gaussian(multiplier / math.sqrt(count), delta)


def test_runs_compose_at_the_least_delta_of_all(run):
    folders = [run(str(delta), charge(1), charge(2), delta=delta) for delta in (1e-3, 1e-6, 1e-2)]
    statement = statement_of(folders)
    (found,) = statement.together
    assert found.cost.epsilon == pytest.approx(gaussian(3.0, 6, 1e-6), rel=1e-6)
    assert (found.num_runs, found.num_others, found.cost.delta, found.scope) == (3, 0, 1e-6, CLIENT)
    assert statement.num_runs == 3
    assert "All 3 private runs together cost a client that was in each of them epsilon " in str(statement)
    assert json.loads(json.dumps(statement.to_dict()))["together"][0]["epsilon"] == found.cost.epsilon


def test_runs_without_privacy_are_told_apart(run):
    noiseless = charge(1, events=(NonPrivateDpEvent(),))
    folders = [run("a", charge(1)), run("seeded", charge(1), private=False), run("noiseless", noiseless)]
    (found,) = statement_of(folders).together
    assert (found.num_runs, found.num_others) == (1, 2)
    assert found.cost.epsilon == pytest.approx(gaussian(3.0, 1, 1e-3), rel=1e-6)
    assert str(found).endswith("; 2 runs without a finite epsilon: with them epsilon is infinite")
    (found,) = statement_of(folders[1:]).together
    assert math.isinf(found.cost.epsilon)
    assert str(found) == "2 runs without a finite epsilon for a client (add-or-remove-one): not private"
    assert statement_of(folders[1:]).to_dict()["together"][0]["epsilon"] is None


def test_units_and_relations_are_apart(run):
    pure = [charge(number, ("c1",), (LaplaceDpEvent(4.0),), RECORD) for number in (1, 2)]
    statement = statement_of([run("a", charge(1)), run("b", *pure, delta=0.0), run("c", *pure, delta=0.0)])
    assert "Costs of different units or relations are apart: no accountant adds them up" in str(statement)
    first, second = statement.together
    assert (first.scope, second.scope) == (CLIENT, RECORD)
    # Sensitivity under replace-one is twice the clip norm: 4 charges of 2 / 4 each.
    assert (second.cost.epsilon, second.cost.delta) == (pytest.approx(2.0), 0.0)


def test_runs_without_a_ledger_are_named(run, tmp_path):
    (tmp_path / "b").mkdir()
    statement = statement_of([run("a", charge(1)), tmp_path / "b"])
    assert statement.num_runs == 1
    assert "Not accounted: b: no ledger in its folder" in str(statement)
    assert "Not covered: choosing among the runs" in str(statement)


def test_where_no_client_has_all_that_others_have_epsilons_add_up():
    other = GaussianDpEvent(2.0)
    runs = [charged({ONE: 4}, {other: 1}), charged({ONE: 1}, {ONE: 2})]
    assert runs[0].worst is None
    assert charged({ONE: 2, other: 1}, {ONE: 1, other: 2}).worst is None
    assert charged({ONE: 1, other: 1}, {ONE: 2, other: 1}, {}).worst == {ONE: 2, other: 1}
    assert runs[1].worst == {ONE: 2}
    cost = compose(runs, 1e-3, CLIENT)
    each = [max(gaussian(3.0, 4, 5e-4), gaussian(2.0, 1, 5e-4)), gaussian(3.0, 2, 5e-4)]
    assert cost.epsilon == pytest.approx(sum(each), rel=1e-6)
    assert cost.accountant == "sum of the runs' epsilons at delta / 2"
