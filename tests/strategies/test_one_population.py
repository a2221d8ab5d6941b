"""Draws, charges and shares of noise come from one number of clients, whoever registers."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from flwr.app import Context, RecordDict
from scipy import integrate, stats
from torch import nn

from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSMP, PrivateEvaluation
from flower_dp.strategies.releases.left_out import RoundLeftOut
from flower_dp.strategies.releases.release import Round
from flower_dp.strategies.releases.replies import Collected
from tests.grids import LocalGrid, asks_to_train

RECORDS = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))
DELTA = 1e-3


def app(model=lambda: nn.Linear(2, 2)):
    def client_fn(context):
        clients = dict.fromkeys(str(context.node_config["names"]).split(","), RECORDS)
        return DPClient(model=model(), clients=clients, training=Training(learning_rate=1e-30))

    return client_app(client_fn)


def node_of(names):
    return Context(run_id=1, node_id=1, node_config={"names": ",".join(names)}, state=RecordDict(), run_config={})


class Nodes(LocalGrid):
    """Nodes that host so many clients each, and nodes that come after the first round."""

    def __init__(self, sizes, late=(), model=lambda: nn.Linear(2, 2)):
        super().__init__(app(model), 0)
        names = iter(f"c{number:03}" for number in range(1000))
        hosts = [[next(names) for _ in range(size)] for size in (*sizes, *late)]
        contexts = {node: node_of(hosted) for node, hosted in enumerate(hosts, start=1)}
        self.contexts = dict(list(contexts.items())[: len(sizes)])
        self.late = dict(list(contexts.items())[len(sizes) :])

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if any(asks_to_train(message) for message in messages):
            self.contexts |= self.late
        return replies


def start(strategy, grid, num_rounds=1, model=None):
    strategy.start(grid, model_arrays(model or nn.Linear(2, 2)), num_rounds=num_rounds)
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
    grid, model, models = Nodes(sizes, late, Wide), Wide(), []

    def keep(number, arrays):
        models.append(np.concatenate([part.ravel() for part in arrays.to_numpy_ndarrays()]))

    nn.init.zeros_(model.linear.weight)
    strategy.start(grid, model_arrays(model), num_rounds=3, evaluate_fn=keep)
    steps = np.diff(models, axis=0) * strategy.rules.release.expected_cohort
    assert len(steps) == 3
    for step in steps:
        assert step.std() == pytest.approx(strategy.rules.release.noise_scale, rel=5 / math.sqrt(2 * size))
    if not evaluating:  # that noise costs this, by Google's accountant
        release = GaussianDpEvent(2.0)
        event = release if isinstance(sampling, FullSampling) else PoissonSampledDpEvent(sampling.sampling_rate, release)
        exact = PLDAccountant().compose(SelfComposedDpEvent(event, 3)).get_epsilon(DELTA)
        (outsiders,) = [one for one in strategy.statement.adversaries if one.name == "outsiders"]
        assert outsiders.epsilon == pytest.approx(exact, rel=1e-2)
    assert len(strategy._session._manager._known.names) == 4
    asked = {message.metadata.dst_node_id for message in grid.sent if asks_to_train(message)}
    assert len(asked) <= len(sizes)


def test_a_round_with_more_replies_than_shares_is_not_released():
    strategy = DPFedSAM(**SHARED, sampling=FULL, num_clients=3)
    release, shared, rng, state = strategy.rules.training, strategy.rules.noise, np.random.default_rng(), strategy.state

    def released(names):
        asked, begun, _ = release.ask(state, 6, "abc", rng)
        words = {"server_round": 1, "method": release.name, "length": 6, "model": None}
        now = Round(**words, ask=asked, asked={1: tuple(names) or ("a",)}, begun=begun)
        release.noised(state, now, Collected(total=np.zeros(6), clients=list(names), seeded=False), rng)

    for replied in range(4):
        assert replied * shared.share(3) ** 2 + shared.server_std(replied) ** 2 == pytest.approx(4.0, rel=1e-12)
        released("abc"[:replied])
    with pytest.raises(RoundLeftOut, match="4 clients answered, and the noise has 3 shares"):
        released("abcd")


# Fixed-size sampling


def true_delta(epsilon, rate, noise_multiplier):
    """Return the delta at epsilon of one release under replace-one, sampled with a rate: a hockey-stick divergence, integrated.

    All other clients send -1, in units of the clip norm; one sends 1, and is replaced by one that sends -1.
    """
    without, sampled = stats.norm(-1, noise_multiplier).pdf, stats.norm(1, noise_multiplier).pdf

    def mixed(x):
        return (1 - rate) * without(x) + rate * sampled(x)

    def divergence(first, second):
        return integrate.quad(lambda x: max(0.0, first(x) - math.exp(epsilon) * second(x)), -12, 12, limit=1000)[0]

    return max(divergence(mixed, without), divergence(without, mixed))


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
@pytest.mark.parametrize("most_newcomers", [None, 5])
def test_cohorts_of_a_fixed_size_are_drawn_from_as_many_clients_as_are_charged(sizes, late, known, most_newcomers):
    """With 4 + 4 + 4 five of eight were drawn, and five of ten charged; a node with nine was counted, and then left out."""
    strategy = DPFedAvg(**FIXED, sampling=FixedSizeSampling(cohort_size=5), most_newcomers=most_newcomers)
    grid = Nodes(sizes, late)
    if known is None:
        with pytest.raises(TimeoutError, match=r"num_clients=10: only \d clients .*is left out: with its \d clients"):
            start(strategy, grid)
        assert strategy.rules.num_rounds(strategy.charges) == 0
        return
    start(strategy, grid)
    names, epsilon = strategy._session._manager._known.names, strategy.statement.epsilon
    assert len(names) == known
    drawn = len(strategy.rules.training.cohort(strategy.state, names, strategy._session.generator("cohort"))[0])
    assert 0.98 * DELTA <= true_delta(epsilon, drawn / len(names), 1.0) <= DELTA


@pytest.mark.parametrize("sampling", [FixedSizeSampling(cohort_size=2), RoundRobinSampling(cohort_size=2)], ids=["size", "turn"])
def test_one_client_more_at_the_start_ends_no_run(sampling):
    strategy, grid = DPFedAvg(**FIXED | {"num_clients": 3}, sampling=sampling), Nodes((1, 1, 1, 1), (1,))
    start(strategy, grid, num_rounds=9)
    assert strategy._session._manager._known.names == ("c000", "c001", "c002")
    assert {message.metadata.dst_node_id for message in grid.sent if asks_to_train(message)} == {1, 2, 3}


def test_a_node_that_names_too_many_clients_does_not_count():
    """Drawn independently as well: the mean is over ten clients, and there would be one."""
    strategy = DPFedAvg(**FIXED, sampling=PoissonSampling(sampling_rate=0.5), most_newcomers=0)
    with pytest.raises(TimeoutError, match=r"only 5 clients .*node 6 is left out: with its 9 clients .* set num_clients=14"):
        start(strategy, Nodes((1, 1, 1, 1, 1, 9)))


@pytest.mark.parametrize("sampling", [FixedSizeSampling(cohort_size=2), FullSampling()], ids=["size", "full"])
def test_a_simulation_has_exactly_as_many_clients_as_are_charged(sampling):
    grid = Nodes((1, 1, 2))
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
        *((one, {"placement": "distributed", "trusted_server": False}, False) for one in (*CENTRAL, *CLOSED)),
        (CENTRAL[1], {"placement": "distributed", "keep_ratio": 0.5}, False),
    ],
    ids=str,
)
def test_a_cohort_is_drawn_from_the_clients_of_the_accounting(sampling, words, takes_more):
    strategy = DPFedSAM(clip_norm=1.0, noise_multiplier=1.0, num_clients=4, delta=DELTA, sampling=sampling, **words)
    release, names = strategy.rules.training, tuple("abcdefgh")
    assert release.open_population is takes_more
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
        grid = Nodes((1,) * 6, (1,))
        start(strategy, grid, num_rounds=4)
        assert len(strategy._session._manager._known.names) == 4
        assert max(message.metadata.dst_node_id for message in grid.sent if message.metadata.message_type != "query") <= 4


# A run that goes on, and several runs
