"""A run's state is one value: it can be stored, compared, and gone on from."""

import copy
import gc
import hashlib
import math
import pickle
from dataclasses import replace

import cloudpickle
import msgspec
import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent
from flwr.app import ArrayRecord, ConfigRecord

from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.core.serialization import dump_bytes, load_bytes, same
from flower_dp.privacy import accounting
from flower_dp.privacy.charges import Charges
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store
from flower_dp.strategies import (
    DPPASGD,
    DPFedAvg,
    DPFedSAM,
    DPStrategy,
    EvaluationBudget,
    FedSGDDPC,
    LocalEvaluation,
    PrivateEvaluation,
)
from flower_dp.strategies.releases.noised_sum import SumState
from tests.charges import charge
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

WORDS = {"clip_norm": 0.5, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3, "noise_seed": 3}


def rounds(strategy: DPStrategy, model: ArrayRecord, numbers: range) -> ArrayRecord:
    grid = LocalGrid(stock_app(shifted(lambda node: 0.1 * node)), 4)
    for server_round in numbers:
        messages = strategy.configure_train(server_round, model, ConfigRecord(), grid)
        model, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    return model


def moved(strategy: DPStrategy, state: object) -> DPStrategy:
    strategy.state = load_bytes(dump_bytes(state))
    return strategy


def test_charges_keep_their_cost_a_run_goes_on_with_the_same_releases_alone():
    """With more noise, another sampling or placement the stored rounds would seem to have cost less."""
    evaluation = PrivateEvaluation(noise_multiplier=2.0, sampling=FullSampling())
    strategy = DPFedAvg(**WORDS, evaluation=evaluation)
    fresh = strategy.state
    charge(strategy, ("a",) * 4)
    charge(strategy, ("a",) * 4, release=strategy.rules.evaluation)
    changes = ({"noise_multiplier": 2.0}, {"sampling": PoissonSampling(sampling_rate=0.5)}, {"num_clients": 5})
    for changed in (*changes, {"evaluation": replace(evaluation, noise_multiplier=4.0)}):
        words = WORDS | {"evaluation": evaluation} | changed
        with pytest.raises(ValueError, match=r"state: the charges of .* are for .*, and this strategy releases"):
            moved(DPFedAvg(**words), strategy.state)
        moved(DPFedAvg(**words), fresh)
    with pytest.raises(ValueError, match="private evaluations were charged, and this strategy has none"):
        moved(DPFedAvg(**WORDS), strategy.state)


PASGD = {"num_clients": 2, "batch_size": 4, "num_records": 8, "clip_norm": 1.0, "epsilon": 2.0, "delta": 1e-3}
PASGD |= {"num_steps": 4, "num_local_steps": 1, "learning_rate": 0.1}


def test_replies_keep_their_cost_a_run_goes_on_by_the_same_terms_alone():
    evaluation = LocalEvaluation(budget=EvaluationBudget(epsilon=0.5, num_evaluations=2))
    words = PASGD | {"evaluation": evaluation}
    strategy = DPPASGD(**words)
    strategy._session.register_clients(("a", "b"))
    charge(strategy, ("a",))
    charge(strategy, ("b",), release=strategy.rules.evaluation)
    same_terms = moved(DPPASGD(**words), strategy.state)
    assert same_terms.rules.evaluation.counts(same_terms.charges) == {"a": 0, "b": 1}
    smaller = {"evaluation": replace(evaluation, budget=EvaluationBudget(epsilon=0.25, num_evaluations=2))}
    for changed in ({"epsilon": 1.0}, {"batch_size": 2}, {"num_steps": 8}, smaller):
        with pytest.raises(ValueError, match=r"state: the charges of .* are for"):
            moved(DPPASGD(**words | changed), strategy.state)


@pytest.mark.parametrize("evaluated", [True, False])
def test_what_another_method_was_charged_is_not_forgotten(evaluated):
    """The statement had 0 rounds, and the next ones were told as if they were the first."""
    plan = PrivateEvaluation(noise_multiplier=2.0, sampling=FullSampling())
    strategy = DPFedAvg(**PRIVATE, evaluation=plan)
    charge(strategy, ("a",) * 4)
    if evaluated:
        charge(strategy, ("a",) * 4, release=strategy.rules.evaluation)
    local = {"mechanism": "laplace", "cohort_size": 4, "num_records": 50, "clip_norm": 1.0, "epsilon": 2.0, "learning_rate": 0.1}
    other = DPFedSAM(**PRIVATE, placement="central", evaluation=plan) if evaluated else FedSGDDPC(num_clients=4, **local)
    other.plan(3)
    before = other.statement
    with pytest.raises(ValueError, match="state: dp-fedavg was charged, and this strategy releases"):
        moved(other, strategy.state)
    assert other.statement == before


def test_a_run_that_has_ended_stays_so():
    """Also where the next round would be paid for: it may be of other clients, or cost less."""
    strategy = DPFedAvg(**PRIVATE, target_epsilon=6.0)
    strategy.plan(50)
    rounds(strategy, MODEL, range(1, 2))
    strategy._session.update_state(ended_before=2)
    other = moved(DPFedAvg(**PRIVATE, target_epsilon=6.0), strategy.state)
    assert not other.configure_train(2, MODEL, ConfigRecord(), grid_of_four())


def test_a_run_of_local_ledgers_does_not_go_on_with_clients_that_it_did_not_begin_with():
    strategy = DPPASGD(**PASGD)
    strategy._session.register_clients(("a", "b"))
    charge(strategy, ("a",))
    other = moved(DPPASGD(**PASGD), strategy.state)
    other._session.register_clients(("b",))  # a client that is not there yet
    assert other.rules.training.counts(other.charges) == {"a": 1, "b": 0}
    with pytest.raises(ValueError, match="'c' joined after the run began"):
        other._session.register_clients(("a", "c"))


PRIVATE = {name: value for name, value in WORDS.items() if name != "noise_seed"}
EVALUATION = PrivateEvaluation(noise_multiplier=1.0, sampling=FullSampling())
MODEL = arrays(w=np.zeros(9, np.float32))


def grid_of_four() -> LocalGrid:
    return LocalGrid(stock_app(shifted(lambda node: 0.1 * node)), 4)


def test_a_run_that_was_not_private_stays_so():
    """Its first round had noise that everyone can compute; the epsilon of the others does not undo that."""
    seeded = DPFedAvg(**WORDS)
    fresh = seeded.state
    rounds(seeded, MODEL, range(1, 2))
    strategy = moved(DPFedAvg(**PRIVATE), seeded.state)
    rounds(strategy, MODEL, range(2, 3))
    again = moved(DPFedAvg(**PRIVATE), strategy.state)
    for one in (strategy, again):
        assert one.state.not_private
        assert not one.statement.private
        assert one.epsilon == math.inf
        assert one.line_of(0)["epsilon"] == 0.0
    assert moved(DPFedAvg(**PRIVATE), fresh).statement.private


class Evaluating(DPFedAvg):
    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_evaluate(self, server_round, replies):
        return None


@pytest.mark.parametrize("kind", ["metrics", "evaluation"])
def test_what_a_run_has_sent_without_protection_is_told_also_when_it_goes_on_without(kind):
    """Of a round that was not finished, too: its messages had left."""
    first = DPFedAvg(**PRIVATE, report_client_metrics=True) if kind == "metrics" else Evaluating(**PRIVATE)
    first.plan(3)
    first.configure_train(1, MODEL, ConfigRecord(), grid_of_four())
    strategy = moved(DPFedAvg(**PRIVATE), first.state)
    told = "clients sent training metrics" if kind == "metrics" else "the strategy's own configure_evaluate"
    assert any(told in line for line in strategy.statement.not_covered)
    assert not any("CLIENT METRICS" in line for line in DPFedAvg(**PRIVATE).statement.not_covered)


def pickled(strategy: DPStrategy) -> DPStrategy:
    return pickle.loads(cloudpickle.dumps(strategy))  # noqa: S301


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
@pytest.mark.parametrize("release", ["training", "evaluation"])
def test_of_several_copies_one_alone_releases_a_round_that_was_charged_once(how, release):
    strategy = DPFedAvg(**PRIVATE, evaluation=EVALUATION)
    grid = grid_of_four()
    messages = strategy.configure_train(1, MODEL, ConfigRecord(), grid)
    if release == "evaluation":
        strategy.aggregate_train(1, grid.send_and_receive(messages))
        strategy.configure_evaluate(1, MODEL, ConfigRecord(), grid)
        assert how(strategy)._session.add_evaluation(1, []) is None
        assert not how(strategy)._session.pending
    else:
        with pytest.raises(RuntimeError, match="aggregate_train needs configure_train"):
            how(strategy).aggregate_train(1, grid.send_and_receive(messages))
        assert how(strategy).charges.numbers() == {"dp-fedavg": 1}
    assert strategy._session.pending


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
@pytest.mark.parametrize("first", ["the copy", "the original"])
def test_of_several_copies_between_rounds_one_alone_goes_on(how, first):
    """Each of the statements would tell of its own rounds alone."""
    strategy, grid = DPFedAvg(**PRIVATE), grid_of_four()
    rounds(strategy, MODEL, range(1, 3))
    one, other = (how(strategy), strategy) if first == "the copy" else (strategy, how(strategy))
    rounds(one, MODEL, range(3, 4))
    with pytest.raises(
        LedgerError, match="the state has 2 of them: the state is older, or a copy of this strategy has continued the run"
    ):
        other.configure_train(3, MODEL, ConfigRecord(), grid)
    assert not [message for message in grid.sent if message.metadata.message_type == "train"]
    other.begin()
    rounds(other, MODEL, range(1, 2))
    assert other.statement.joint.num_runs == 2


def test_a_pickle_of_a_run_that_has_gone_on_and_was_deleted_does_not_go_on():
    """Its statement would lack what was released meanwhile."""
    strategy, grid = DPFedAvg(**PRIVATE), grid_of_four()
    rounds(strategy, MODEL, range(1, 2))
    text = cloudpickle.dumps(strategy)
    rounds(strategy, MODEL, range(2, 3))
    del strategy
    gc.collect()
    with pytest.raises(LedgerError, match="the state has 1 of them: the state is older"):
        pickle.loads(text).configure_train(2, MODEL, ConfigRecord(), grid)  # noqa: S301


def test_a_state_of_another_run_that_was_charged_as_often_is_refused():
    """The statement of both, and of what went on, was that of one: their numbers of charges are equal."""
    first, second = DPFedAvg(**PRIVATE), DPFedAvg(**PRIVATE)
    for one in (first, second):
        rounds(one, MODEL, range(1, 3))
    with pytest.raises(LedgerError, match="another run made it, which was charged as often as this one"):
        moved(first, second.state)
    moved(first, first.state)
    moved(moved(DPFedAvg(**PRIVATE), second.state), second.state)
    first.begin()
    moved(first, second.state)
    assert (first.statement.num_charged_rounds, first.statement.joint.num_runs) == (2, 2)


def test_a_state_without_its_charges_is_refused():
    """That of a checkpoint has numbers alone; the statement had nothing, and the model of two rounds."""
    strategy, other = DPFedAvg(**PRIVATE), DPFedAvg(**PRIVATE)
    rounds(strategy, MODEL, range(1, 3))
    with pytest.raises(LedgerError, match="was charged 2 x dp-fedavg, and the state has nothing: its statement would lack"):
        moved(other, replace(strategy.state, charges=Charges()))
    assert not other.rounds


def test_what_was_charged_elsewhere_is_not_forgotten_where_a_ledger_is_opened(tmp_path):
    """The run began anew on the ledger, was refused there, and its statement had no rounds."""
    Store.create(tmp_path / "server.sqlite")
    first = DPFedAvg(**PRIVATE)
    rounds(first, MODEL, range(1, 3))
    strategy = moved(DPFedAvg(**PRIVATE, ledger=tmp_path / "server.sqlite"), first.state)
    with pytest.raises(LedgerError, match=r"ledger .*: this run was charged 2 x dp-fedavg elsewhere, and the ledger would lack"):
        rounds(strategy, MODEL, range(3, 4))
    assert strategy.statement.num_charged_rounds == 2
    strategy.begin()
    rounds(strategy, MODEL, range(1, 2))
    assert strategy.statement.num_charged_rounds == 1


@pytest.mark.parametrize("how", [lambda strategy: strategy, copy.deepcopy, pickled], ids=["itself", "copy", "pickled"])
def test_what_was_charged_elsewhere_is_in_the_joint_epsilon(how):
    other = DPFedAvg(**PRIVATE)
    rounds(other, MODEL, range(1, 4))
    strategy = how(moved(DPFedAvg(**PRIVATE), other.state))
    rounds(strategy, MODEL, range(4, 5))
    assert (strategy.statement.num_charged_rounds, strategy.statement.joint) == (4, None)
    for number in (2, 3):
        strategy.begin()
        rounds(strategy, MODEL, range(1, 2))
        assert (strategy.statement.joint.num_runs, strategy.statement.joint.epsilon) == (number, math.inf)


def test_on_a_ledger_a_state_has_the_charges_that_the_run_has_there(tmp_path):
    Store.create(tmp_path / "server.sqlite")
    strategy = DPFedAvg(**PRIVATE, ledger=tmp_path / "server.sqlite")
    fresh = strategy.state
    rounds(strategy, MODEL, range(1, 2))
    first = strategy.state
    rounds(strategy, MODEL, range(2, 3))
    strategy.state = replace(strategy.state, asked_metrics=True)
    for closes in (False, True):
        for state, has in ((fresh, "nothing"), (first, "1 x dp-fedavg")):
            with pytest.raises(LedgerError, match=f"this run was charged 2 x dp-fedavg, and the state has {has}: its statement"):
                strategy.state = state
        assert strategy.statement.num_charged_rounds == 2
        if not closes:
            strategy.close()
    strategy.begin()
    strategy.state = fresh
    assert strategy.statement.num_charged_rounds == 0


@pytest.mark.parametrize("on_ledger", [True, False])
def test_a_state_without_a_charge_of_one_release_is_refused(on_ledger, tmp_path):
    """A release that the state does not name was charged nothing by it."""
    Store.create(tmp_path / "server.sqlite")
    strategy = DPFedAvg(**PRIVATE, evaluation=EVALUATION, ledger=tmp_path / "server.sqlite" if on_ledger else None)
    rounds(strategy, MODEL, range(1, 2))
    before = strategy.state
    strategy.configure_evaluate(1, MODEL, ConfigRecord(), grid_of_four())
    strategy.aggregate_evaluate(1, [])
    with pytest.raises(LedgerError, match=r"1 x dp-fedavg, 1 x private-evaluation, and the state has 1 x dp-fedavg"):
        strategy.state = before


def open_round(release):
    """Return a strategy whose clients were asked, its state before, what ends the round, and the replies."""
    strategy, grid = DPFedAvg(**PRIVATE, evaluation=EVALUATION), grid_of_four()
    fresh = strategy.state
    messages = strategy.configure_train(1, MODEL, ConfigRecord(), grid)
    if release == "training":
        return strategy, fresh, strategy.aggregate_train, grid.send_and_receive(messages)
    model, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    messages = strategy.configure_evaluate(1, model, ConfigRecord(), grid)
    return strategy, fresh, strategy.aggregate_evaluate, grid.send_and_receive(messages)


@pytest.mark.parametrize("which", ["before the round", "of another run", "of now"])
@pytest.mark.parametrize("release", ["training", "evaluation"])
def test_no_state_is_set_while_a_round_is_open(release, which):
    """A model was released that nobody had charged: the statement had 0 rounds, or those of another run."""
    other = DPFedAvg(**PRIVATE, evaluation=EVALUATION)
    rounds(other, MODEL, range(1, 4))
    strategy, fresh, finish, replies = open_round(release)
    state = {"before the round": fresh, "of another run": other.state, "of now": strategy.state}[which]
    stated = strategy.statement
    with pytest.raises(RuntimeError, match=r"state: round 1 of .* is open"):
        strategy.state = state
    assert strategy.statement == stated
    finish(1, replies)
    assert not strategy._session.pending


@pytest.mark.parametrize("release", ["training", "evaluation"])
@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_a_round_is_not_released_where_its_release_was_charged_again_since(release, how):
    """By a copy, which has charged the same run: the rounds of both would be released, and one of them told."""
    strategy, _, finish, replies = open_round(release)
    other = how(strategy)
    own = other.rules.training if release == "training" else other.rules.evaluation
    charge(other, [str(node) for node in range(4)], release=own)
    with pytest.raises(RuntimeError, match="has continued the run while the round was open, so the round is not released"):
        finish(1, replies)
    assert not strategy._session.pending


def test_a_new_run_begins_while_a_round_is_open():
    """The charge of the open round stays in the joint epsilon."""
    strategy, *_ = open_round("training")
    strategy.begin()
    rounds(strategy, MODEL, range(1, 2))
    assert strategy.statement.num_charged_rounds == 1
    assert strategy.statement.joint.num_runs == 2


def cost(count):
    """Of so many rounds."""
    event = SelfComposedDpEvent(DPFedAvg(**PRIVATE).rules.release.mechanism.event(), count)
    return pytest.approx(accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one").epsilon, rel=1e-9)


def test_what_a_strategys_runs_have_cost_together_is_told():
    strategy = DPFedAvg(**PRIVATE)
    for num_rounds in (2, 3):
        strategy.start(grid_of_four(), MODEL, num_rounds=num_rounds)
    copied = copy.deepcopy(strategy)
    copied.start(grid_of_four(), MODEL, num_rounds=1)
    for one, count, num_runs in ((strategy, 5, 2), (copied, 6, 3)):
        assert (one.statement.joint.epsilon, one.statement.joint.num_runs) == (cost(count), num_runs)
    assert strategy.statement.num_charged_rounds == 3
    seeded = DPFedAvg(**WORDS)
    for _ in range(2):
        seeded.start(grid_of_four(), MODEL, num_rounds=1)
    assert seeded.statement.joint.epsilon == math.inf


def test_a_run_that_released_what_the_one_before_it_did_has_its_own_joint_epsilon():
    """Its statement was that of the run before, without a joint epsilon: the states of the two are equal."""
    strategy = DPFedAvg(**PRIVATE)
    fresh = strategy.state
    rounds(strategy, MODEL, range(1, 2))
    assert strategy.statement.joint is None
    strategy.state = fresh
    rounds(strategy, MODEL, range(1, 2))
    assert strategy.statement.joint.epsilon == cost(2)


class Twice(DPFedAvg):
    def start(self, grid, initial_arrays, num_rounds=3, **named):
        result = super().start(grid, initial_arrays, num_rounds, **named)
        return super().start(grid, result.arrays, num_rounds, **named)


def test_a_second_start_within_a_start_forgets_nothing():
    """The statement was that of the second half alone, and a target epsilon was spent twice."""
    strategy, grid = Twice(**PRIVATE), grid_of_four()
    with pytest.raises(RuntimeError, match="rounds were charged already, and a new run would forget their cost"):
        strategy.start(grid, MODEL, num_rounds=2)
    assert strategy.statement.num_charged_rounds == 2
    assert len([one for one in grid.sent if one.metadata.message_type == "train"]) == 8
    with pytest.raises(RuntimeError, match="rounds were charged already"):  # a new run, as far as its second start
        strategy.start(grid, MODEL, num_rounds=2)
    assert strategy.statement.joint.num_runs == 2


def test_states_are_equal_if_all_that_they_hold_is():
    one = {"a": np.arange(3.0), "b": (1, "x", math.nan)}
    assert same(one, {"a": np.arange(3.0), "b": (1, "x", math.nan)})
    changes = (
        {"b": (1, "y", math.nan)},
        {"a": np.arange(3)},
        {"a": np.array([0.0, 1.0, 2.5])},
        {"b": [1, "x", math.nan]},
        {"a": None},
    )
    assert not any(same(one, one | changed) for changed in changes)
    assert not same(one, {"b": one["b"]})


@pytest.mark.parametrize(
    "value",
    [
        {1: {"x": np.zeros(2)}, 2: [True, None, 1.5], -3: (), "": [], "ü": {}},
        (1, (2.5, [math.nan, -math.inf, (None,)]), 2**63 - 1, -(2**63) + 1, "", 0.0, -0.0),
        [None, "float32", [2], b""[:0].decode()],  # as an array is stored
        ["SumState", {"order": "a"}],  # as a dataclass is
        [np.zeros((2, 0, 3), np.float16), np.array(3.0), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(["a", "bc"])],
        [np.array([], np.int64), np.arange(3, dtype=">i2"), np.array([True, False]), np.array([1j, 2])],
        SumState(clip_norm=2.0, order="a", released=np.arange(3.0)),
    ],
)
def test_a_value_that_was_stored_is_what_it_was(value):
    found = load_bytes(dump_bytes(value))
    assert same(found, value)
    assert dump_bytes(found) == dump_bytes(value)


@pytest.mark.parametrize(
    "held",
    [
        ["Nobody", {}],
        ["SumState", {"unknown": 1}],
        ["SumState", 3],
        [None, "<f8", [3], b"12345678"],
        [None, "|O", [1], b"12345678"],
        [None],
        [],
    ],
)
def test_a_malformed_state_is_refused(held):
    body = msgspec.msgpack.encode(held)
    for content in (body, body[:-1], body + b"x", b""):
        file = b"flower-dp state 3\n%s\n%s" % (hashlib.sha256(content).hexdigest().encode(), content)
        with pytest.raises(ValueError, match="is malformed"):
            load_bytes(file)


@pytest.mark.parametrize(
    "value", [lambda: None, 2**63, -(2**63), np.float64(1.0), {1.5: 1}, {(): 1}, b"x", np.array([None]), {1, 2}, Ellipsis]
)
def test_what_is_no_value_is_not_stored(value):
    with pytest.raises(ValueError, match=r"state/x/0=.*can't be stored"):
        dump_bytes({"x": [value]})
