"""Nodes that join, leave, and come back under another id, between the rounds of one run."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from flower_dp.clients import DPClient, FedSGDDPCRecipe, LocalDPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.strategies import DPFedAvg, FedSGDDPC, PrivateEvaluation
from flower_dp.strategies.population.client_manager import ClientManager
from tests.charges import charge
from tests.grids import LocalGrid
from tests.stock import shifted, stock_app

WORDS = {"clip_norm": 1e6, "noise_multiplier": 1e-9, "sampling": FullSampling(), "num_clients": 3, "delta": 1e-3}
RECORDS = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))


def app(methods=None):
    def client_fn(context):
        clients = dict.fromkeys(str(context.node_config["names"]).split(","), RECORDS)
        if methods == "fedsgd-dpc":
            recipe = FedSGDDPCRecipe(mechanism="laplace", clip_norm=1.0, epsilon=1.0, num_replies=9)
            return LocalDPClient(model=nn.Linear(2, 2), clients=clients, recipe=recipe)
        return DPClient(model=nn.Linear(2, 2), clients=clients, training=Training(learning_rate=0.1))

    return client_app(client_fn)


class Moving(LocalGrid):
    """A grid whose nodes change before a round: {round: {node: names or None}}."""

    def __init__(self, app, first, changes):
        super().__init__(app, 0)
        self.changes = changes
        self.asked = []
        self.change(first)

    def change(self, nodes):
        for node, names in nodes.items():
            self.contexts.pop(node, None)
            if names is not None:
                self.contexts[node] = Context(
                    run_id=1, node_id=node, node_config={"names": names}, state=RecordDict(), run_config={}
                )

    def send_and_receive(self, messages, *, timeout=None):
        out = list(messages)
        train = [message for message in out if "config" in message.content.config_records]
        if train:
            self.asked.append({message.metadata.dst_node_id for message in train})
            replies = list(super().send_and_receive(out, timeout=timeout))
            self.change(self.changes.get(len(self.asked) + 1, {}))
            return replies
        return super().send_and_receive(out, timeout=timeout)


def run(first, changes, *, num_rounds=3, strategy=None, kind=None):
    grid = Moving(app(kind), first, changes)
    strategy = strategy or DPFedAvg(**WORDS)
    model = nn.Linear(2, 2)
    result = strategy.start(grid, model_arrays(model), num_rounds=num_rounds)
    return strategy, grid, result


THREE = {1: "a", 2: "b", 3: "c"}


def test_a_delta_is_judged_by_the_clients_that_are_known():
    """0.3 is below 1 / 3 clients of the start, and above 1 / 4 once one has joined, also after it has left."""
    for changes, warned in (({}, False), ({2: {4: "d"}}, True), ({2: {4: "d"}, 3: {4: None}}, True)):
        strategy, _, _ = run(THREE, changes, strategy=DPFedAvg(**WORDS | {"delta": 0.3}))
        assert ("DELTA IS NO GUARANTEE: 0.3 is at least 1 / 4 clients" in str(strategy.statement)) is warned


def test_a_fourth_client_joins_and_takes_part(caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        strategy, grid, _ = run(THREE, {2: {4: "d"}})
    assert grid.asked == [{1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    assert [report.replies for report in strategy.rounds] == [3, 4, 4]
    assert "1 clients have joined: d; 4 are known, num_clients=3" in caplog.text


def test_a_client_that_leaves_is_not_asked_and_the_denominator_stays():
    strategy, grid, _ = run(THREE, {2: {3: None}})
    assert grid.asked == [{1, 2, 3}, {1, 2}, {1, 2}]
    assert strategy.missing.total == 0
    assert strategy.rules.release.expected_cohort == 3


@pytest.mark.parametrize("node", [77, 3])
def test_a_client_that_comes_back_is_asked_there(node):
    strategy, grid, _ = run(THREE, {2: {3: None}, 3: {node: "c"}})
    assert grid.asked == [{1, 2, 3}, {1, 2}, {1, 2, node}]
    assert strategy._session._manager._known.names == ("a", "b", "c")


def test_a_name_is_asked_on_one_node_alone(caplog):
    """The first node keeps it while it is there; then the other one has it, also when the first comes back."""
    strategy, grid, _ = run(THREE, {2: {9: "c"}, 3: {3: None}, 4: {3: "c"}}, num_rounds=4)
    assert grid.asked == [{1, 2, 3}, {1, 2, 3}, {1, 2, 9}, {1, 2, 9}]
    assert [report.cohort_size for report in strategy.rounds] == [3, 3, 3, 3]
    assert "client 'c' is hosted by nodes 3 and 9: the first one is asked" in caplog.text


def test_more_clients_than_num_clients_at_the_start():
    strategy, _, _ = run({**THREE, 4: "d"}, {}, num_rounds=1)
    assert strategy.rounds[0].replies == 4
    _, grid, _ = run({**THREE, 4: "d"}, {}, strategy=DPFedAvg(**WORDS | {"sampling": RoundRobinSampling(cohort_size=3)}))
    assert grid.asked == [{1, 2, 3}] * 3


def test_a_newcomer_that_runs_another_method_or_no_client_is_not_asked(caplog):
    said = {4: '{"clients":["d"],"methods":["nbafl"]}', 5: '{"error":"no data here"}'}

    class Other(Moving):
        def send_and_receive(self, messages, *, timeout=None):
            for reply in super().send_and_receive(list(messages), timeout=timeout):
                for record in reply.content.config_records.values() if reply.has_content() else ():
                    if reply.metadata.src_node_id in said and "methods" in str(record.get("flower-dp", "")):
                        record["flower-dp"] = said[reply.metadata.src_node_id]
                yield reply

    grid = Other(app(), THREE, {2: {4: "d", 5: "e"}})
    DPFedAvg(**WORDS).start(grid, model_arrays(nn.Linear(2, 2)), num_rounds=3)
    assert grid.asked == [{1, 2, 3}] * 3
    assert "node 4 is not asked" in caplog.text
    assert "node 5 is not asked" in caplog.text


def test_a_run_that_everybody_left_waits_and_then_fails():
    with pytest.raises(TimeoutError, match="no client is connected any more"):
        run(THREE, {2: dict.fromkeys(THREE)}, strategy=DPFedAvg(**WORDS, registration_timeout=0.3))


def test_a_node_that_is_left_out_is_nobody_for_whom_a_run_goes_on():
    """Every round would be charged, and nobody asked."""
    words = {"most_newcomers": 0, "registration_timeout": 0.3}
    with pytest.raises(TimeoutError, match="no client is connected any more"):
        run(THREE, {2: {**dict.fromkeys(THREE), 9: "x"}}, strategy=DPFedAvg(**WORDS, **words))


def test_every_known_client_is_drawn_with_the_same_rate():
    """2,000 Poisson cohorts of 3 + 3 clients: a rate 5 standard deviations (0.05) from 0.3 has a probability below 1e-6."""
    strategy = DPFedAvg(**WORDS | {"sampling": PoissonSampling(sampling_rate=0.3)}, noise_seed=1)
    manager = ClientManager(3, timeout=1, newcomers=True)
    grid = LocalGrid(stock_app(shifted(lambda node: 0.0)), 3)
    manager.known_clients(grid)
    grid.contexts.update(dict.fromkeys((11, 12, 13), grid.contexts[1]))
    known_clients = manager.known_clients(grid)
    assert len(known_clients.names) == 6
    counts = np.zeros(6)
    for number in range(2000):
        rng = strategy._session.generator("cohort", number)
        counts[strategy.rules.training.cohort(strategy.state, known_clients.names, rng)[0]] += 1
    assert (abs(counts / 2000 - 0.3) < 0.05).all()


def test_fixed_size_cohorts_are_drawn_from_all_that_were_ever_there():
    """As many as it was accounted for: who left is drawn as well, and not asked."""
    arguments = WORDS | {"sampling": FixedSizeSampling(cohort_size=2)}
    strategy, grid, _ = run(THREE, {2: {3: None}}, num_rounds=40, strategy=DPFedAvg(**arguments))
    sizes = [len(nodes) for nodes in grid.asked[1:]]
    assert set(sizes) == {1, 2}
    (line,) = strategy.rules.ledger(strategy.charges).lines()
    assert line.startswith("40 x SampledWithoutReplacementDpEvent(source_dataset_size=3, sample_size=2, ")


def test_methods_with_terms_of_single_clients_take_no_newcomers_but_take_back_their_own(caplog):
    words = {"mechanism": "laplace", "num_clients": 3, "cohort_size": 3, "num_records": 4, "clip_norm": 1.0}
    strategy = FedSGDDPC(**words, epsilon=1.0, learning_rate=0.1, num_replies=9)
    _, grid, _ = run(THREE, {2: {3: None, 4: "d"}, 3: {30: "c"}}, strategy=strategy, kind="fedsgd-dpc")
    assert grid.asked == [{1, 2, 3}, {1, 2}, {1, 2, 30}]
    assert "1 clients of node 4 are not asked: d; with them there would be more than 3 (num_clients)" in caplog.text
    counts = {name: ledger.num_charges for name, ledger in strategy.rules.ledgers(strategy.charges).items()}
    assert counts == {"a": 3, "b": 3, "c": 2}


@pytest.mark.parametrize("how", ["training", "evaluation"])
def test_in_turn_a_run_goes_on_with_the_clients_and_the_order_with_which_it_began(how, tmp_path):
    """With another first client 'a' would have a second turn in the second round, and everyone be charged for one."""
    in_turn = RoundRobinSampling(cohort_size=1)
    evaluation = PrivateEvaluation(noise_multiplier=1.0, sampling=in_turn)
    words = WORDS | {"noise_multiplier": 1.0} | ({"sampling": in_turn} if how == "training" else {"evaluation": evaluation})

    def stop(server_round, arrays):
        if server_round == 1:
            raise OSError("the server's process has ended")

    def begin(nodes, *, resume):
        place = {"checkpoint_dir": tmp_path / "run", "resume": resume, "evaluate_fn": stop}
        DPFedAvg(**words).start(Moving(app(), nodes, {}), model_arrays(nn.Linear(2, 2)), num_rounds=3, **place)

    with pytest.raises(RuntimeError, match="evaluate_fn"):
        begin(THREE, resume=False)
    with pytest.raises(ValueError, match="clients: they are not those with which this run began"):
        begin({1: "a", 2: "b", 3: "A"}, resume=True)
    with pytest.raises(RuntimeError, match="evaluate_fn"):
        begin(THREE, resume=True)
    strategy = DPFedAvg(**words)
    release = strategy.rules.training if how == "training" else strategy.rules.evaluation
    _, begun = release.cohort(strategy.state, ("a", "b", "c"), strategy._session.generator("cohort"))
    strategy._session.note(releases={release.name: begun})
    with pytest.raises(ValueError, match="in the same order"):
        release.cohort(strategy.state, ("b", "c", "a"), strategy._session.generator("cohort"))


def test_charges_in_turn_without_their_order_are_not_gone_on_from():
    strategy = DPFedAvg(**WORDS | {"sampling": RoundRobinSampling(cohort_size=1)})
    charge(strategy, ("a",))
    with pytest.raises(ValueError, match="in the same order"):
        strategy.rules.training.cohort(strategy.state, ("a", "b", "c"), strategy._session.generator("cohort"))
