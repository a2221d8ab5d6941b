"""Runs on a server's ledger: charged in the file before a message leaves, a budget of all runs, and their joint epsilon."""

import json
import math
import sqlite3
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from flwr.app import ConfigRecord, Message

from flower_dp.clients import model_arrays
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.privacy import accounting, store
from flower_dp.privacy.budget import LedgerBudget
from flower_dp.privacy.charges import ALL_CLIENTS, Charge, CostScope
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.private_file import BudgetSpentError, LedgerError
from flower_dp.privacy.store import Store
from flower_dp.strategies import DPPASGD, DPFedAvg, PrivateEvaluation
from flower_dp.strategies.log import MemoryLog, StoreLog
from tests.charges import Kept, assert_charges_are_the_ledgers, charge
from tests.contract_runs import SMALL, app_of, evaluating_stock_app
from tests.contracts import Words
from tests.gaps import Killed
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import linear
from tests.stock import shifted, stock_app
from tests.test_contract import of_each_kind

WORDS = {"clip_norm": 0.5, "noise_multiplier": 4.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}


class LookingGrid(LocalGrid):
    """Looks into a ledger's file, by a connection of its own, when messages leave."""

    path = None

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.seen = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        asks = any(asks_to_train(one) or one.metadata.message_type == "evaluate" for one in messages)
        if self.path is not None and asks:
            db = sqlite3.connect(self.path)
            told = [json.loads(about) for (about,) in db.execute("SELECT about FROM charges ORDER BY id")]
            db.close()
            self.seen.append((told[-1]["release"], told[-1]["round"], len(told)))
        return super().send_and_receive(messages, timeout=timeout)


@pytest.fixture
def path(tmp_path):
    tmp_path.chmod(0o700)
    Store.create(tmp_path / "ledger.sqlite")
    return tmp_path / "ledger.sqlite"


def grid(path=None):
    made = LookingGrid(stock_app(shifted(lambda node: 0.01 * node)), 4)
    made.path = path
    return made


def run(strategy, path, num_rounds=3, looking=None):
    strategy.start(looking or grid(), model_arrays(linear()), num_rounds=num_rounds)
    return strategy


def written(path):
    with Store(path, read_only=True) as ledger:
        return [ledger.read(one) for one in ledger.runs]


@of_each_kind
def test_every_round_of_every_method_is_in_the_file_before_its_messages_leave(method, path):
    arguments = Words()
    strategy = method.strategy(arguments)
    strategy._session.ledger = path
    nodes = LookingGrid(app_of(method, arguments, SMALL, num_nodes=4), 4)
    nodes.path = path
    run(strategy, path, arguments.num_rounds, nodes)
    # The broadcasts of NbAFL are charged before the model of the next round leaves.
    late = any(charge.rounds_late for charge in method.charges)
    assert nodes.seen == [(method.name, one, one + late * (one - 1)) for one in (1, 2, 3)]
    (charges,) = written(path)
    assert_charges_are_the_ledgers(strategy, Kept(each=list(charges)))
    assert strategy.charges.numbers() == {method.name: 3} | ({"broadcast": 3} if late else {})
    assert strategy.statement.joint is None


def test_evaluations_are_in_the_file_before_their_messages_leave(path):
    evaluation = PrivateEvaluation(noise_multiplier=8.0, sampling=FullSampling(), every=2)
    nodes = LookingGrid(evaluating_stock_app(), 4)
    nodes.path = path
    run(DPFedAvg(**WORDS, evaluation=evaluation, ledger=path), path, 4, nodes)
    expected = [("dp-fedavg", 1), ("dp-fedavg", 2), ("private-evaluation", 2)]
    expected += [("dp-fedavg", 3), ("dp-fedavg", 4), ("private-evaluation", 4)]
    assert nodes.seen == [(*one, number) for number, one in enumerate(expected, start=1)]


def test_a_charge_that_cannot_be_written_sends_nothing_and_is_not_taken(path, monkeypatch):
    strategy, nodes = DPFedAvg(**WORDS, ledger=path), grid(path)
    append, calls = Store.append, []

    def full(self, *arguments, **named):
        calls.append(1)
        if len(calls) == 3:
            raise LedgerError("ledger x: database or disk is full")
        return append(self, *arguments, **named)

    monkeypatch.setattr(Store, "append", full)
    with pytest.raises(LedgerError, match="disk is full"):
        run(strategy, path, 5, nodes)
    assert [number for *_, number in nodes.seen] == [1, 2]
    assert sum(one.metadata.message_type == "train" for one in nodes.sent) == 8
    assert strategy.statement.num_charged_rounds == 2 == len(written(path)[0])
    assert strategy._session.log.charges.numbers() == {"dp-fedavg": 2}
    # The lock is free again.
    Store(path).close()


def test_a_run_on_a_ledger_in_use_or_missing_or_of_a_device_ends_before_any_client_is_asked(path, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.05)
    nodes = grid()
    DeviceLedger.create(tmp_path / "device.sqlite", ["c0"])
    with pytest.raises(LedgerError, match="is a device's ledger; must be a server's"):
        run(DPFedAvg(**WORDS, ledger=tmp_path / "device.sqlite"), path, 2, nodes)
    with Store(path), pytest.raises(LedgerError, match="is in use: another process writes to it"):
        run(DPFedAvg(**WORDS, ledger=path), path, 2, nodes)
    with pytest.raises(LedgerError, match="does not exist"):
        run(DPFedAvg(**WORDS, ledger=tmp_path / "other"), path, 2, nodes)
    assert nodes.sent == []


@pytest.mark.parametrize("value", ["", 3, b"x", object()])
def test_what_is_no_path_is_refused(value):
    with pytest.raises(ValueError, match=r"ledger=.*: must be the path of a server's ledger"):
        DPFedAvg(**WORDS, ledger=value)


# Several runs


def test_the_joint_epsilon_of_two_runs_is_that_of_their_events_together(path):
    first = run(DPFedAvg(**WORDS, ledger=path), path, 3)
    evaluation = PrivateEvaluation(noise_multiplier=8.0, sampling=PoissonSampling(sampling_rate=0.5))
    other = WORDS | {"noise_multiplier": 3.0, "sampling": PoissonSampling(sampling_rate=0.5), "delta": 1e-4}
    second = run(DPFedAvg(**other, evaluation=evaluation, ledger=path), path, 4, LookingGrid(evaluating_stock_app(), 4))
    events = ComposedDpEvent([one.rules.ledger(one.charges).event for one in (first, second)])
    expected = accounting.epsilon(events, delta=1e-4, relation="add-or-remove-one").epsilon
    joint = second.statement.joint
    assert (joint.num_runs, joint.delta, joint.runs_not_included) == (2, 1e-4, ())
    assert joint.epsilon == pytest.approx(expected, rel=1e-9)
    assert joint.epsilon > second.statement.epsilon * 1.01
    line = f"All 2 runs on this ledger together: epsilon {math.ceil(expected * 1e4) / 1e4:.4f} at delta 0.0001 (accountant"
    assert line in " ".join(str(second.statement).split())
    assert second.statement.to_dict()["guarantee"]["joint"]["epsilon"] == joint.epsilon
    assert first.statement.joint is None
    assert "together" not in str(first.statement)


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_statement_says_whether_a_budget_holds_for_settings_that_results_decided(tmp_path, adaptive):
    path = tmp_path / "with budget"
    Store.create(path, LedgerBudget(epsilon=50.0, delta=1e-6, fully_adaptive=adaptive))
    first, second = (run(DPFedAvg(**WORDS, ledger=path), path, 1) for _ in range(2))
    assert first.statement.joint is None
    told = "If results of some runs chose the settings of others: at most epsilon 50.0000 at delta 1e-06, the ledger's budget."
    assert (told in " ".join(str(second.statement).split())) == adaptive
    joint = second.statement.to_dict()["guarantee"]["joint"]
    assert (joint["filter_epsilon"], joint["filter_delta"]) == ((50.0, 1e-6) if adaptive else (None, None))
    assert joint["epsilon"] < 50


def together(count):
    """Of so many rounds of the strategy of these tests."""
    event = SelfComposedDpEvent(GaussianDpEvent(WORDS["noise_multiplier"]), count)
    return pytest.approx(accounting.epsilon(event, delta=WORDS["delta"], relation="add-or-remove-one").epsilon, rel=1e-9)


def checkpointed(strategy, folder, num_rounds, *, resume=False, dies_in=None):
    def evaluate(server_round, arrays):
        if server_round == dies_in:
            raise Killed

    with suppress(Killed):
        named = {"num_rounds": num_rounds, "evaluate_fn": evaluate, "checkpoint_dir": folder, "resume": resume}
        strategy.start(grid(), model_arrays(linear()), **named)
    return strategy.statement.joint


def test_runs_of_one_strategy_with_ledgers_of_their_own_have_a_joint_epsilon(tmp_path):
    """Beside checkpoints every run has a ledger of its own; runs without checkpoints count as well."""
    strategy = DPFedAvg(**WORDS)
    assert checkpointed(strategy, tmp_path / "a", 2) is None
    second = checkpointed(strategy, tmp_path / "b", 3)
    assert (second.num_runs, second.epsilon) == (2, together(5))
    third = run(strategy, None, 1).statement.joint
    assert (third.num_runs, third.epsilon) == (3, together(6))
    last = checkpointed(strategy, tmp_path / "c", 1)
    assert (last.num_runs, last.epsilon) == (4, together(7))
    line = f"All 4 runs of this strategy together: epsilon {math.ceil(last.epsilon * 1e4) / 1e4:.4f}"
    assert line in " ".join(str(strategy.statement).split())


@pytest.mark.parametrize("shared", [True, False])
def test_a_charge_that_was_written_when_the_run_was_interrupted_is_in_the_joint_epsilon(shared, path, tmp_path, monkeypatch):
    """A signal is handled when SQLite returns from the disk, before the process knows that the charge is there."""
    strategy, append = DPFedAvg(**WORDS, ledger=path if shared else None), Store.append

    def interrupted(self, run, one):
        append(self, run, one)
        if one.server_round == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", interrupted)
        assert checkpointed(strategy, tmp_path / "a", 4) is None
    assert strategy.statement.num_charged_rounds == 2
    assert checkpointed(strategy, tmp_path / "b", 1).epsilon == together(3)


def test_a_charge_that_could_not_be_written_does_not_stand_for_the_next_one_of_its_number(path, monkeypatch):
    """The joint epsilon had the clients of the first cohort, who were not asked, and not those of the second."""
    scope, memory = CostScope(unit="record", relation="replace-one"), MemoryLog(private=True)
    log = StoreLog(path, method="m", delta=1e-3, private=True, memory=memory)
    words = {
        "release": "m",
        "number": 1,
        "server_round": 1,
        "fingerprint": "k",
        "scope": scope,
        "events": (GaussianDpEvent(1.0),),
    }

    def full(self, run, one):
        raise LedgerError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", full)
        with pytest.raises(LedgerError, match="disk is full"):
            log.append(Charge(owners=("a",), **words))
    log.append(Charge(owners=("b",), **words))
    log.close()
    assert memory.all.owners(scope) == log.charges.owners(scope) == ["b"]


def test_a_run_that_goes_on_is_one_run_with_all_of_its_rounds(tmp_path):
    strategy = DPFedAvg(**WORDS)
    assert checkpointed(strategy, tmp_path / "a", 4, dies_in=2) is None
    assert checkpointed(strategy, tmp_path / "a", 4, resume=True) is None
    assert checkpointed(strategy, tmp_path / "b", 1).epsilon == together(5)
    other = DPFedAvg(**WORDS)  # of another process, which knows the rest of its run by the ledger
    checkpointed(other, tmp_path / "c", 4, dies_in=3)
    other = DPFedAvg(**WORDS)
    assert checkpointed(other, tmp_path / "c", 4, resume=True) is None
    joint = checkpointed(other, tmp_path / "d", 2)
    assert (joint.num_runs, joint.epsilon) == (2, together(6))


def test_runs_of_another_relation_are_told_apart(path):
    run(DPFedAvg(**WORDS, relation="replace-one", ledger=path), path, 2)
    second = run(DPFedAvg(**WORDS, ledger=path), path, 2)
    joint = second.statement.joint
    assert (joint.num_runs, joint.epsilon) == (1, pytest.approx(second.statement.epsilon, rel=1e-9))
    assert joint.runs_not_included == ("1 run for each client (replace-one)",)
    left_out = "Not included, since no accountant composes them with these: 1 run for each client (replace-one)."
    assert left_out in " ".join(str(second.statement).split())


def test_after_a_run_with_a_fixed_seed_nothing_is_private(path):
    first, second = (run(DPFedAvg(**WORDS, ledger=path, noise_seed=seed), path, 1) for seed in (3, None))
    assert (first.statement.private, second.statement.private) == (False, True)
    assert second.statement.joint.epsilon == math.inf
    assert second.statement.to_dict()["guarantee"]["joint"]["epsilon"] is None
    assert "together: epsilon infinite" in " ".join(str(second.statement).split())


# A budget of all runs


def test_a_run_ends_before_the_round_that_the_ledgers_budget_does_not_cover(tmp_path):
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.sqlite"
    budget = (together(7).expected + together(8).expected) / 2
    Store.create(path, LedgerBudget(epsilon=budget, delta=1e-3))
    first = run(DPFedAvg(**WORDS, ledger=path), path, 5)
    assert (first.statement.num_charged_rounds, first.incidents) == (5, ())
    nodes = grid(path)
    second = run(DPFedAvg(**WORDS, ledger=path), path, 5, nodes)
    assert second.statement.num_charged_rounds == 2
    assert [number for *_, number in nodes.seen] == [6, 7]
    (incident,) = second.incidents
    assert incident.startswith("ended before round 3: it would exceed the ledger's budget, epsilon ")
    assert second.statement.joint.epsilon <= budget
    # It stays so, also for a caller with a loop of its own.
    assert not second.configure_train(4, model_arrays(linear()), ConfigRecord(), grid())
    with pytest.raises(ValueError, match="no round was run: ended before round 1: it would exceed the ledger's budget"):
        run(DPFedAvg(**WORDS, ledger=path), path, 5)
    assert sum(map(len, written(path))) == 7


def test_an_evaluation_that_the_ledgers_budget_does_not_cover_is_left_out(tmp_path, caplog):
    tmp_path.chmod(0o700)
    path = tmp_path / "ledger.sqlite"
    evaluation = PrivateEvaluation(noise_multiplier=0.5, sampling=FullSampling())
    Store.create(path, LedgerBudget(epsilon=2.5, delta=1e-3))
    strategy = run(DPFedAvg(**WORDS, evaluation=evaluation, ledger=path), path, 2, LookingGrid(evaluating_stock_app(), 4))
    assert [charge.release for charge in written(path)[0]] == ["dp-fedavg", "dp-fedavg"]
    assert "The evaluation of round 1 was left out: it would exceed the ledger's budget" in caplog.text
    assert not strategy.evaluations


def test_the_owner_of_a_client_level_run_is_every_client(path):
    run(DPFedAvg(**WORDS, ledger=path), path, 1)
    assert written(path)[0][0].owners == (ALL_CLIENTS,)


# A charge stands in one place


NAMES = ("c0", "c1", "c2", "c3")
BUDGET = 4.0


def together_of(*multipliers, relation):
    """The epsilon of Gaussian releases with these noise multipliers."""
    event = ComposedDpEvent(list(map(GaussianDpEvent, multipliers)))
    return accounting.epsilon(event, delta=1e-3, relation=relation).epsilon


def with_charges(strategy, path, charges):
    """The strategy, in a run on a ledger that has these charges, after another run that has the first of them."""
    Store.create(path, LedgerBudget(epsilon=BUDGET, delta=1e-3))
    words = {"method": strategy.rules.about.title, "delta": 1e-3, "private": True}
    with Store(path) as ledger:
        ledger.append(ledger.begin(**words), charges[0])
    strategy._session.log = log = StoreLog(path, **words)
    for one in charges:
        log.append(one)
    return strategy


def costlier(one, multiplier):
    """The charge with another event in the place of each of its own."""
    event = (GaussianDpEvent(multiplier),)
    return replace(one, events=event, which=(0,) * len(one.owners), views=dict.fromkeys(one.views, event))


@pytest.mark.parametrize("planned", [True, False])
def test_a_charge_of_all_clients_stands_in_one_place(tmp_path, planned):
    """One event of one round is changed in the log: statement, stop, joint epsilon and the ledger's budget follow, as by hand."""
    relation = "add-or-remove-one"
    found = {}
    for second in (4.0, 1.0):
        target = (together_of(4, 4, 4, relation=relation) + together_of(4, 1, 4, relation=relation)) / 2
        strategy = DPFedAvg(**WORDS, target_epsilon=target)
        if planned:
            strategy.plan(3)
        release, charges = strategy.rules.training, [charge(strategy, NAMES) for _ in range(2)]
        with_charges(strategy, tmp_path / f"{second}", [charges[0], costlier(charges[1], second)])
        rules, statement = strategy.rules, strategy.statement
        own, joint = together_of(4, second, relation=relation), together_of(4, 4, second, relation=relation)
        assert statement.epsilon == pytest.approx(own, rel=1e-9)
        assert {one.name: one.epsilon for one in statement.adversaries}["outsiders"] == pytest.approx(own, rel=1e-9)
        assert own <= strategy.epsilon * (1 + 1e-9) <= 1.01 * own
        assert statement.joint.epsilon == pytest.approx(joint, rel=1e-9)
        found[second] = rules.stop_reason(strategy._session.current, 3, None)
        third = costlier(release.charge(strategy.charges, 3, NAMES), 1.5)
        assert (together_of(4, 4, second, 1.5, relation=relation) > BUDGET) == (second == 1)
        with pytest.raises(BudgetSpentError) if second == 1 else nullcontext():
            strategy._session.log.append(third)
        assert strategy.statement.num_charged_rounds == (2 if second == 1 else 3)
    assert found == {4.0: None, 1.0: f"it would pass target_epsilon={target:g}"}


def test_a_charge_of_single_clients_stands_in_one_place(tmp_path):
    """One charge in the log is changed: it costs more, and clients who were not asked are charged as well."""
    relation = "replace-one"
    for changed in (False, True):
        words = {"num_clients": 4, "batch_size": 4, "num_records": 8, "clip_norm": 1.0, "epsilon": 2.0, "delta": 1e-3}
        strategy = DPPASGD(**words, num_steps=2, num_local_steps=1, learning_rate=0.1)
        strategy.plan(2, NAMES)
        release, charges = strategy.rules.training, [charge(strategy, names) for names in (NAMES, NAMES[:2])]
        usual = charges[0].events[0].noise_multiplier
        second = usual / 2 if changed else usual
        if changed:
            charges[1] = costlier(replace(charges[1], owners=NAMES, which=(0,) * 4), second)
        with_charges(strategy, tmp_path / f"{changed}", charges)
        statement = strategy.statement
        own = together_of(usual, second, relation=relation)
        others = own if changed else together_of(usual, relation=relation)
        assert statement.epsilon == pytest.approx(own, rel=1e-3)
        assert statement.clients.by_client == pytest.approx(dict(zip(NAMES, (own, own, others, others), strict=True)), rel=1e-3)
        assert statement.joint.epsilon == pytest.approx(together_of(usual, usual, second, relation=relation), rel=1e-6)
        stop = strategy.rules.stop_reason(strategy._session.current, 3, None)
        assert (stop is None) is not changed
        assert stop is None or stop.startswith("the privacy budget is spent")
        paying = release.paying(strategy.charges, NAMES).tolist()
        assert paying == [False, False, not changed, not changed]
        third = release.charge(strategy.charges, 3, NAMES[2:])
        assert (together_of(usual, usual, second, usual, relation=relation) > BUDGET) == changed
        with pytest.raises(BudgetSpentError) if changed else nullcontext():
            strategy._session.log.append(third)
