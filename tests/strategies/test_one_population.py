"""Who is there: draws, charges and shares of noise come from one number of clients, while nodes join, leave and come back."""

import logging
import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Context, RecordDict
from torch import nn

from flower_dp import wire
from flower_dp.clients import (
    DPClient,
    FedSGDDPCRecipe,
    LocalDPClient,
    NbAFLTerms,
    TensorRecords,
    Training,
    client_app,
    model_arrays,
    privacy_mod,
)
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy.store import Store
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSGDDPC, FedSMP, NbAFL, PrivateEvaluation
from flower_dp.strategies.population.client_manager import KnownClients
from flower_dp.strategies.releases.left_out import RoundDiscarded
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from tests.charges import charge
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app

WORDS = {"clip_norm": 1e6, "noise_multiplier": 1e-9, "sampling": FullSampling(), "num_clients": 3, "delta": 1e-3}
RECORDS = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))
DELTA = 1e-3


def linear():
    return nn.Linear(2, 2)


def app(methods=None, model=linear):
    def client_fn(context):
        clients = dict.fromkeys(str(context.node_config["names"]).split(","), RECORDS)
        if methods == "fedsgd-dpc":
            recipe = FedSGDDPCRecipe(mechanism="laplace", clip_norm=1.0, epsilon=1.0, num_replies=9)
            return LocalDPClient(model=model(), clients=clients, recipe=recipe)
        return DPClient(model=model(), clients=clients, training=Training(learning_rate=1e-30))

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
                config = {"names": names}
                self.contexts[node] = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def send_and_receive(self, messages, *, timeout=None):
        out = list(messages)
        train = [message for message in out if "config" in message.content.config_records]
        replies = list(super().send_and_receive(out, timeout=timeout))
        if train:
            self.asked.append({message.metadata.dst_node_id for message in train})
            self.change(self.changes.get(len(self.asked) + 1, {}))
        return replies


def nodes(sizes, late=(), model=linear):
    """Nodes that host so many clients each, and nodes that come after the first round."""
    names = iter(f"c{number:03}" for number in range(1000))
    hosts = {node: ",".join(next(names) for _ in range(size)) for node, size in enumerate((*sizes, *late), start=1)}
    there = dict(list(hosts.items())[: len(sizes)])
    return Moving(app(model=model), there, {2: {node: hosted for node, hosted in hosts.items() if node not in there}})


def start(strategy, grid, num_rounds=1):
    strategy.start(grid, model_arrays(linear()), num_rounds=num_rounds)
    return strategy


# Shares of noise


FULL, POISSON = FullSampling(), PoissonSampling(sampling_rate=0.9)
SHARED = {"clip_norm": 1.0, "noise_multiplier": 2.0, "delta": DELTA, "placement": "distributed"}


@pytest.mark.parametrize(
    ("sampling", "sizes", "late", "evaluating"),
    [
        (FULL, (1,) * 9, (), False),
        (POISSON, (1,) * 9, (), True),
        (FULL, (1,) * 4, (1,) * 4, True),
        (POISSON, (1,) * 4, (1,) * 4, False),
        (FULL, (2, 2), (1, 2), False),
        (POISSON, (2, 2), (1, 2), True),
        (POISSON, (1,) * 4, (), False),
    ],
)
def test_the_noise_of_a_sum_of_shares_is_that_of_the_statement_whoever_registers(sampling, sizes, late, evaluating):
    """Clients send their shares alone, of updates near 0: the sample std of 2 x 20,000 values is within 5 standard deviations, 1.8 %.

    With more clients than shares it grew with the number of replies, by 5 to 50 %, and told how many clients were drawn.
    """
    size = 20_000

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(size - 4))
            self.linear = nn.Linear(2, 2, bias=False)

        def forward(self, inputs):
            return self.linear(inputs) + 0 * self.weights.sum()

    evaluation = PrivateEvaluation(noise_multiplier=1.0, sampling=FullSampling()) if evaluating else None
    strategy = DPFedSAM(**SHARED, sampling=sampling, num_clients=4, evaluation=evaluation)
    grid, model, models = nodes(sizes, late, Wide), Wide(), []

    def keep(number, arrays):
        models.append(np.concatenate([part.ravel() for part in arrays.to_numpy_ndarrays()]))

    nn.init.zeros_(model.linear.weight)
    strategy.start(grid, model_arrays(model), num_rounds=3, evaluate_fn=keep)
    steps = np.diff(models, axis=0) * strategy.rules.release.expected_cohort_size
    assert len(steps) == 3
    for step in steps:
        assert step.std() == pytest.approx(strategy.rules.release.noise_scale, rel=5 / math.sqrt(2 * size))
    assert len(strategy._session._manager._known.names) == 4
    assert len(set().union(*grid.asked)) <= len(sizes)


def test_a_round_with_more_replies_than_shares_is_not_released():
    strategy = DPFedSAM(**SHARED, sampling=FULL, num_clients=3)
    release, shared, rng, state = strategy.rules.training, strategy.rules.noise, np.random.default_rng(), strategy.state

    def released(names):
        asked, begun, _ = release.ask(state, 6, "abc", rng)
        words = {"server_round": 1, "method": release.name, "length": 6, "model": None}
        now = RoundRequest(**words, ask=asked, asked={1: tuple(names) or ("a",)}, begun=begun)
        release.noised(state, now, CollectedReplies(total=np.zeros(6), clients=list(names), seeded=False), rng)

    for replied in range(4):
        assert replied * shared.share_std(3) ** 2 + shared.server_std(replied) ** 2 == pytest.approx(4.0, rel=1e-12)
        released("abc"[:replied])
    with pytest.raises(RoundDiscarded, match="4 clients answered, and the noise has 3 shares"):
        released("abcd")


# Fixed-size sampling


FIXED = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_clients": 10, "delta": DELTA, "registration_timeout": 0.5}


@pytest.mark.parametrize(
    ("sizes", "late", "known"),
    [
        ((4, 4, 4), (), None),
        ((1,) * 5 + (9,), (), None),
        ((1,) * 10 + (9,), (), 10),
        ((4, 4, 4, 2), (), 10),
        ((5, 5), (5, 1), 10),
    ],
)
@pytest.mark.parametrize("max_new_clients", [None, 5])
def test_cohorts_of_a_fixed_size_are_drawn_from_as_many_clients_as_are_charged(sizes, late, known, max_new_clients):
    """With 4 + 4 + 4 five of eight were drawn, and five of ten charged; a node with nine was counted, and then left out."""
    strategy = DPFedAvg(**FIXED, sampling=FixedSizeSampling(cohort_size=5), max_new_clients=max_new_clients)
    grid = nodes(sizes, late)
    if known is None:
        with pytest.raises(TimeoutError, match=r"num_clients=10: only \d clients .*is left out: with its \d clients"):
            start(strategy, grid)
        assert strategy.rules.num_rounds(strategy.charges) == 0
        return
    start(strategy, grid)
    names = strategy._session._manager._known.names
    drawn = strategy.rules.training.cohort(strategy.state, names, strategy._session.generator("cohort"))[0]
    assert (len(names), len(drawn)) == (known, 5)
    (line,) = strategy.rules.ledger(strategy.charges).lines()
    assert line.startswith("1 x SampledWithoutReplacementDpEvent(source_dataset_size=10, sample_size=5")


@pytest.mark.parametrize("sampling", [FixedSizeSampling(cohort_size=2), RoundRobinSampling(cohort_size=2)], ids=["size", "turn"])
def test_one_client_more_at_the_start_ends_no_run(sampling):
    strategy, grid = DPFedAvg(**FIXED | {"num_clients": 3}, sampling=sampling), nodes((1, 1, 1, 1), (1,))
    start(strategy, grid, num_rounds=9)
    assert strategy._session._manager._known.names == ("c000", "c001", "c002")
    assert set().union(*grid.asked) == {1, 2, 3}


def test_a_node_that_names_too_many_clients_does_not_count():
    """Drawn independently as well: the mean is over ten clients, and there would be one."""
    strategy = DPFedAvg(**FIXED, sampling=PoissonSampling(sampling_rate=0.5), max_new_clients=0)
    with pytest.raises(TimeoutError, match=r"only 5 clients .*node 6 is left out: with its 9 clients .* set num_clients=14"):
        start(strategy, nodes((1, 1, 1, 1, 1, 9)))


@pytest.mark.parametrize("sampling", [FixedSizeSampling(cohort_size=2), FullSampling()], ids=["size", "full"])
def test_a_simulation_has_exactly_as_many_clients_as_are_charged(sampling):
    grid = nodes((1, 1, 2))
    grid.simulated = True
    with pytest.raises(ValueError, match="num_clients=3: 4 clients have registered; set num_clients=4"):
        start(DPFedAvg(**FIXED | {"num_clients": 3}, sampling=sampling), grid)


# At the release


CENTRAL = (FullSampling(), PoissonSampling(sampling_rate=0.5))
CLOSED = (FixedSizeSampling(cohort_size=2), RoundRobinSampling(cohort_size=1), FixedSizeSampling(cohort_size=4))


@pytest.mark.parametrize(
    ("sampling", "words", "takes_more"),
    [
        *((one, {"placement": "central"}, True) for one in CENTRAL),
        *((one, {"placement": "central"}, False) for one in CLOSED),
        *((one, {"placement": "distributed"}, False) for one in (*CENTRAL, *CLOSED)),
        *((one, {"placement": "distributed", "server_completes_noise": False}, False) for one in (*CENTRAL, *CLOSED)),
        (CENTRAL[1], {"placement": "distributed", "keep_ratio": 0.5}, False),
    ],
    ids=str,
)
def test_a_cohort_is_drawn_from_the_clients_of_the_accounting(sampling, words, takes_more):
    strategy = DPFedSAM(clip_norm=1.0, noise_multiplier=1.0, num_clients=4, delta=DELTA, sampling=sampling, **words)
    release, names = strategy.rules.training, tuple("abcdefgh")
    assert release.accepts_new_clients is takes_more
    for count in range(1, 9):
        if count == 4 or (count > 4 and takes_more):
            assert (release.cohort(strategy.state, names[:count], strategy._session.generator("cohort"))[0] < count).all()
            continue
        with pytest.raises(ValueError, match=f"clients: there are {count}, and .* is accounted for num_clients=4"):
            release.cohort(strategy.state, names[:count], strategy._session.generator("cohort"))


def test_a_second_release_of_the_round_has_the_same_clients():
    """An evaluation by a cohort of a fixed size closes the population for training as well, and shared masks change nothing."""
    evaluation = PrivateEvaluation(noise_multiplier=1.0, sampling=FixedSizeSampling(cohort_size=2))
    words = FIXED | {"num_clients": 4, "relation": "replace-one", "evaluation": evaluation}
    for strategy in (
        DPFedAvg(**words, sampling=PoissonSampling(sampling_rate=0.5)),
        FedSMP(**words, sampling=PoissonSampling(sampling_rate=0.5), keep_ratio=0.5, mask="rand-k"),
    ):
        grid = nodes((1,) * 6, (1,))
        start(strategy, grid, num_rounds=4)
        assert len(strategy._session._manager._known.names) == 4
        assert set().union(*grid.asked) <= {1, 2, 3, 4}


# A run that goes on, and several runs


# Nodes that come and go


def run(first, changes, *, num_rounds=3, strategy=None, kind=None):
    grid = Moving(app(kind), first, changes)
    strategy = start(strategy or DPFedAvg(**WORDS), grid, num_rounds)
    return strategy, grid


THREE = {1: "a", 2: "b", 3: "c"}


def test_a_delta_is_judged_by_the_clients_that_are_known():
    """0.3 is below 1 / 3 clients of the start, and above 1 / 4 once one has joined, also after it has left."""
    for changes, warned in (({}, False), ({2: {4: "d"}}, True), ({2: {4: "d"}, 3: {4: None}}, True)):
        strategy, _ = run(THREE, changes, strategy=DPFedAvg(**WORDS | {"delta": 0.3}))
        guarantee = " ".join(str(strategy.statement).partition("AGAINST WHOM")[0].split())
        assert ("DELTA IS NO GUARANTEE: 0.3 is at least 1/4 for 4 clients" in guarantee) is warned


@pytest.mark.parametrize(("delta", "warned"), [(0.3, False), (0.34, True)])
def test_a_delta_that_guarantees_nothing_is_warned_of_before_the_first_round(caplog, delta, warned):
    with caplog.at_level(logging.WARNING, "flwr"):
        run(THREE, {}, num_rounds=1, strategy=DPFedAvg(**WORDS | {"delta": delta}))
    warnings = [record for record in caplog.records if "DELTA IS NO GUARANTEE" in record.getMessage()]
    assert [getattr(record, "shown", False) for record in warnings] == [True] * warned


def test_a_fourth_client_joins_and_takes_part(caplog):
    with caplog.at_level(logging.INFO, "flwr"):
        strategy, grid = run(THREE, {2: {4: "d"}})
    assert grid.asked == [{1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    assert [report.replies for report in strategy.rounds] == [3, 4, 4]
    assert "1 clients have joined: d; 4 are known, num_clients=3" in caplog.text


def test_a_client_that_leaves_is_not_asked_and_the_denominator_stays():
    strategy, grid = run(THREE, {2: {3: None}})
    assert grid.asked == [{1, 2, 3}, {1, 2}, {1, 2}]
    assert strategy.missing.total == 0
    assert strategy.rules.release.expected_cohort_size == 3


@pytest.mark.parametrize("node", [77, 3])
def test_a_client_that_comes_back_is_asked_there(node):
    strategy, grid = run(THREE, {2: {3: None}, 3: {node: "c"}})
    assert grid.asked == [{1, 2, 3}, {1, 2}, {1, 2, node}]
    assert strategy._session._manager._known.names == ("a", "b", "c")


def test_a_name_is_asked_on_one_node_alone(caplog):
    """The first node keeps it while it is there; then the other one has it, also when the first comes back."""
    strategy, grid = run(THREE, {2: {9: "c"}, 3: {3: None}, 4: {3: "c"}}, num_rounds=4)
    assert grid.asked == [{1, 2, 3}, {1, 2, 3}, {1, 2, 9}, {1, 2, 9}]
    assert [report.cohort_size for report in strategy.rounds] == [3, 3, 3, 3]
    assert "Client 'c' is hosted by nodes 3 and 9: the first one gets its requests" in caplog.text


def test_a_run_that_everybody_left_waits_and_then_fails():
    with pytest.raises(TimeoutError, match="no client is connected any more"):
        run(THREE, {2: dict.fromkeys(THREE)}, strategy=DPFedAvg(**WORDS, registration_timeout=0.3))


def test_a_node_that_is_left_out_is_nobody_for_whom_a_run_goes_on():
    """Every round would be charged, and nobody asked."""
    words = {"max_new_clients": 0, "registration_timeout": 0.3}
    with pytest.raises(TimeoutError, match="no client is connected any more"):
        run(THREE, {2: {**dict.fromkeys(THREE), 9: "x"}}, strategy=DPFedAvg(**WORDS, **words))


def test_fixed_size_cohorts_are_drawn_from_all_that_were_ever_there():
    """As many as it was accounted for: who left is drawn as well, and not asked."""
    arguments = WORDS | {"sampling": FixedSizeSampling(cohort_size=2)}
    strategy, grid = run(THREE, {2: {3: None}}, num_rounds=40, strategy=DPFedAvg(**arguments))
    sizes = [len(nodes) for nodes in grid.asked[1:]]
    assert set(sizes) == {1, 2}
    (line,) = strategy.rules.ledger(strategy.charges).lines()
    assert line.startswith("40 x SampledWithoutReplacementDpEvent(source_dataset_size=3, sample_size=2, ")


def test_methods_with_terms_of_single_clients_take_no_newcomers_but_take_back_their_own(caplog):
    words = {"mechanism": "laplace", "num_clients": 3, "cohort_size": 3, "num_records": 4, "clip_norm": 1.0}
    strategy = FedSGDDPC(**words, epsilon=1.0, learning_rate=0.1, num_replies=9)
    _, grid = run(THREE, {2: {3: None, 4: "d"}, 3: {30: "c"}}, strategy=strategy, kind="fedsgd-dpc")
    assert grid.asked == [{1, 2, 3}, {1, 2}, {1, 2, 30}]
    assert "1 clients of node 4 get no requests: d; with them there would be more than 3 (num_clients)" in caplog.text
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
        DPFedAvg(**words).start(Moving(app(), nodes, {}), model_arrays(linear()), num_rounds=3, **place)

    with pytest.raises(RuntimeError, match="evaluate_fn"):
        begin(THREE, resume=False)
    with pytest.raises(ValueError, match="clients: they are not those with which this run began"):
        begin({1: "a", 2: "b", 3: "A"}, resume=True)
    with pytest.raises(RuntimeError, match="evaluate_fn"):
        begin(THREE, resume=True)
    strategy = DPFedAvg(**words)
    release = strategy.rules.training if how == "training" else strategy.rules.evaluation
    _, begun = release.cohort(strategy.state, ("a", "b", "c"), strategy._session.generator("cohort"))
    strategy._session.update_state(releases={release.name: begun})
    with pytest.raises(ValueError, match="in the same order"):
        release.cohort(strategy.state, ("b", "c", "a"), strategy._session.generator("cohort"))


def test_charges_in_turn_without_their_order_are_not_gone_on_from():
    strategy = DPFedAvg(**WORDS | {"sampling": RoundRobinSampling(cohort_size=1)})
    charge(strategy, ("a",))
    with pytest.raises(ValueError, match="in the same order"):
        strategy.rules.training.cohort(strategy.state, ("a", "b", "c"), strategy._session.generator("cohort"))


# Names that are made of their nodes' ids, which change when a node starts anew


TERMS = NbAFLTerms(clip_norm=1.0, epsilon=2.0, delta=DELTA, min_records=8, num_records=8, num_replies=1)
MODEL = arrays(w=np.zeros(4, np.float32))


def devices(first, **words):
    """Nodes that have started anew: their ids are others than before, and the devices the same."""
    mod = privacy_mod(terms=TERMS, **words)
    made = stock_app(shifted(lambda node: 0.1), num_examples=lambda node: 8, mods=[mod])
    return Moving(made, {first + device: f"device-{device}" for device in range(3)}, {})


def nbafl(**options):
    return NbAFL(num_clients=3, num_records=8, clip_norm=1.0, epsilon=2.0, delta=DELTA, num_replies=1, **options)


def composed(count):
    """Return the epsilon of so many replies of one client, by Google's accountant: sensitivity is twice the clip norm."""
    multiplier = nbafl().rules.uplink_noise_std / 2
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    return accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), count)).get_epsilon(DELTA)


STARTS = (1, 1001, 7 * 10**18, 9 * 10**18)


def test_names_that_change_are_refused_on_a_ledger_that_runs_share(tmp_path):
    """By its new name a client had a new budget: four runs of 2 were stated as 2, and a budget of 2.5 never ended."""
    path = tmp_path / "server.sqlite"
    Store.create(path)
    for first in STARTS:
        with pytest.raises(ValueError, match=f"ledger: client 'node-{first}' is named by its node's id, which changes when"):
            nbafl(ledger=path).start(devices(first), MODEL, num_rounds=1)
    with Store(path, read_only=True) as ledger:
        assert not ledger.num_charges


def test_names_that_change_have_no_joint_epsilon():
    strategy = nbafl()
    for number, first in enumerate(STARTS, start=1):
        strategy.start(devices(first), MODEL, num_rounds=1)
        assert strategy.statement.epsilon == pytest.approx(2.0, rel=1e-3)
        assert any(line.startswith("NAMES CHANGE: ") for line in strategy.statement.not_covered)
        assert strategy.statement.joint is None if number == 1 else strategy.statement.joint.epsilon >= composed(number)
    assert strategy.statement.joint.epsilon == math.inf
    strategy.start(devices(5, name=lambda context: context.node_config["names"]), MODEL, num_rounds=1)
    assert strategy.statement.joint.epsilon == math.inf  # of the runs before
    assert not any("NAMES CHANGE" in line for line in strategy.statement.not_covered)


@pytest.mark.parametrize(
    ("name", "node", "changes"),
    [
        ("node-7", 7, True),
        ("node-7", 8, False),
        ("client-7", 7, False),
        ("site-12345678901", 12345678901, True),
        ("site-12345678901", 12345678902, False),
        ("node-7", None, False),
    ],
)
def test_a_name_is_known_to_be_made_of_its_nodes_id(name, node, changes):
    known = KnownClients(names=("x", name), nodes=(3, node), record_names=wire.MESSAGE_API, hosting=True)
    assert known.named_by_node == ((name,) if changes else ())
