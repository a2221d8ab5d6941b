"""Devices with ledger files notice by their own counts that a server goes on from an older copy of its ledger."""

import json
import shutil

import pytest

from flower_dp import wire
from flower_dp.clients import DPFedPAQRecipe, LocalDPClient, client_app, model_arrays
from flower_dp.clients.account import LEDGER_PATH
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.device_store import DeviceLedger
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.store import Store
from flower_dp.strategies import DPFedPAQ, LocalEvaluation
from tests.gaps import Killed
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import linear, records

NAMES = ("c0", "c1")
NUM_ROUNDS = 6
OLDER = "the server's ledger is an older copy"
STEPS = FedPAQSteps(learning_rate=0.1, num_local_steps=2, batch_size=4, clip_norm=0.5, sensitivity="per-step")
FEDPAQ = {"steps": STEPS, "epsilon": 4.0, "delta": 1e-3, "num_replies": NUM_ROUNDS, "quantization_levels": None}
BUDGET = EvaluationBudget(epsilon=0.5, num_evaluations=NUM_ROUNDS)


def strategy_of():
    evaluation = LocalEvaluation(budget=BUDGET, metrics={"accuracy": 1.0})
    return DPFedPAQ(**FEDPAQ, sampling=FullSampling(), num_clients=2, num_records=8, evaluation=evaluation)


class DyingGrid(LocalGrid):
    """Two devices, each with a ledger file; the messages of one round are charged, and then the server dies before they leave."""

    def __init__(self, folder, dies_in=None):
        def client_fn(context):
            name = NAMES[int(context.node_config["partition-id"])]
            words = {"recipe": DPFedPAQRecipe(**FEDPAQ), "context": context, "evaluation": BUDGET, "device": "cpu"}
            return LocalDPClient(model=linear(), clients={name: records(name)}, **words)

        super().__init__(client_app(client_fn), 2)
        self.dies_in = dies_in
        for node, context in self.contexts.items():
            context.node_config[LEDGER_PATH] = str(folder / f"{NAMES[node - 1]}.sqlite")

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if any(asks_to_train(message) and asked(message)["server_round"] == self.dies_in for message in messages):
            raise Killed
        return super().send_and_receive(messages, timeout=timeout)


def asked(message):
    texts = [record[wire.KEY] for record in message.content.config_records.values() if wire.KEY in record]
    return json.loads(texts[0])


def numbered(grid):
    """The run and the numbers in all messages to the first client, training and evaluations apart."""
    found = {}
    for message in grid.sent:
        if message.metadata.dst_node_id == 1 and message.metadata.message_type in ("train", "evaluate"):
            table = asked(message)
            if "ask" in table:
                (own,) = table["ask"]["own"].values()
                found.setdefault((table["method"], own["run"]), []).append(own["number"])
    return found


@pytest.fixture
def case(tmp_path):
    for name in NAMES:
        DeviceLedger.create(tmp_path / f"{name}.sqlite", [name])
    return Case(tmp_path)


class Case:
    """One run in a folder, one life after the other, on devices that stay."""

    def __init__(self, folder):
        self.folder, self.checkpoint = folder, folder / "checkpoint"

    def live(self, dies_in=None, **changes):
        """Return the grid, and the strategy, of a life that has ended, or died."""
        grid, strategy = DyingGrid(self.folder, dies_in), changes.pop("strategy", None) or strategy_of()
        place = {"checkpoint_dir": self.checkpoint, "resume": True, "num_rounds": NUM_ROUNDS} | changes
        try:
            strategy.start(grid, model_arrays(linear()), **place)
        except Killed:
            assert dies_in is not None
        return grid, strategy

    def accounts(self):
        return {name: entry for part in NAMES for name, entry in DeviceLedger(self.folder / f"{part}.sqlite").read().items()}

    def replies(self):
        return {name: entry.replies for name, entry in self.accounts().items() if name in NAMES}


def test_devices_refuse_what_an_older_copy_of_the_whole_server_asks_again_and_the_statement_says_so(case):
    case.live(dies_in=3)
    shutil.copytree(case.checkpoint, case.folder / "older")
    case.live(dies_in=6)
    assert case.replies() == {"c0": 4, "c1": 4}  # rounds 1, 2, 4 and 5
    shutil.rmtree(case.checkpoint)
    shutil.copytree(case.folder / "older", case.checkpoint)
    _, strategy = case.live()
    # Round 3 was charged before the copy. 4 and 5 are asked a second time, and 6 never arrived before.
    assert [report.replies for report in strategy.rounds] == [2, 2, 0, 0, 2]
    assert strategy.missing.declined == 4
    assert case.replies() == {"c0": 5, "c1": 5}
    (incident,) = [line for line in strategy.statement.incidents if OLDER in line]
    assert incident.startswith("A device reports a second request")
    assert OLDER in " ".join(str(strategy.statement).split())
    assert OLDER in strategy.state.refusal


def test_rounds_that_never_arrived_raise_no_alarm_and_a_run_keeps_its_id(case):
    lives = [case.live(dies_in=2), case.live(dies_in=4), case.live()]
    strategy = lives[-1][1]
    assert [report.replies for report in strategy.rounds] == [2, 2, 2, 2]
    assert not [line for line in strategy.statement.incidents if OLDER in line]
    assert strategy.missing.declined == 0
    with Store(case.checkpoint / "ledger.sqlite", read_only=True) as ledger:
        (run,) = ledger.runs
    assert [numbered(grid)["dp-fedpaq", run] for grid, _ in lives] == [[1], [3], [5, 6]]
    assert {key for grid, _ in lives for _, key in numbered(grid)} == {run}
    assert case.accounts()["c0"].runs == {run: 6}


def test_training_and_evaluations_are_counted_apart(case):
    grid, strategy = case.live()
    assert [numbers for _, numbers in numbered(grid).items()] == [[1, 2, 3, 4, 5, 6]] * 2
    assert strategy.missing.total == 0
    assert {tuple(entry.runs.values()) for entry in case.accounts().values()} == {(6,)}
    assert set(case.accounts()) == {"c0", "c0, evaluation", "c1", "c1, evaluation"}


def test_runs_of_one_strategy_without_a_ledger_have_ids_of_their_own(case):
    """On the same devices the second begins to count anew, and is not taken for the first."""
    strategy = strategy_of()
    grids = []
    for _ in range(2):
        grid, _ = case.live(strategy=strategy, checkpoint_dir=None, resume=False, num_rounds=3)
        grids.append(grid)
        assert [report.replies for report in strategy.rounds] == [2, 2, 2]
        assert not [line for line in strategy.statement.incidents if OLDER in line]
    runs = [{run for _, run in numbered(grid)} for grid in grids]
    assert [len(found) for found in runs] == [1, 1]
    assert runs[0] != runs[1]
    assert case.replies() == {"c0": 6, "c1": 6}


def test_a_message_that_comes_twice_is_charged_once_and_answered_once(case):
    grid, _ = case.live(dies_in=2)
    message = next(one for one in grid.sent if asks_to_train(one) and one.metadata.dst_node_id == 1)
    before = case.accounts()["c0"]
    (reply,) = LocalGrid.send_and_receive(grid, [message])
    answer = wire.answer_of(reply.content, ("c0",))
    (run,) = before.runs
    why = f"reply 1 of run {run} was charged before; the server's ledger is an older copy, or the message came twice"
    assert answer.refused == {"c0": wire.Refusal(code="repeated", reason=why)}
    assert case.accounts()["c0"] == before


def test_another_refusal_is_not_taken_for_it(case):
    for name in NAMES:
        entry = DeviceLedger(case.folder / f"{name}.sqlite")
        entry.path.unlink()
        DeviceLedger.create(entry.path, ["somebody else"])
    strategy = strategy_of()
    with pytest.raises(RuntimeError, match="its ledger can't be used"):
        case.live(strategy=strategy, checkpoint_dir=None, resume=False)
    assert strategy.missing.declined
    assert not [line for line in strategy.statement.incidents if OLDER in line]
