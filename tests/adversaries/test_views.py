"""What participants, outsiders and the server learn of a run, and what its statement says that it costs."""

import json
import math

import pytest
from dp_accounting import GaussianDpEvent
from flwr.app import Context, RecordDict

from flower_dp import record_run, wire
from flower_dp.clients import FedSGDDPCRecipe, model_arrays
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling
from flower_dp.privacy import accounting
from flower_dp.running.run_folder import read_metrics
from flower_dp.strategies import DPFedAvg, DPFedSAM, FedSGDDPC, PrivateEvaluation
from tests.asks import table_of
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import grid_of, linear, records, shared_noise_app

HALF = PoissonSampling(sampling_rate=0.5)
WORDS = {"clip_norm": 0.5, "noise_multiplier": 4.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}


def played(strategy, num_nodes=4, num_rounds=3, **arguments):
    grid = LocalGrid(shared_noise_app(), num_nodes, **arguments)
    strategy.start(grid, model_arrays(linear()), num_rounds=num_rounds)
    return grid


class TwoOfThree(FullSampling):
    """A user's own sampling: whether its cost counts on a secret is not known."""

    def sample(self, server_round, num_clients, rng):
        return rng.permutation(num_clients)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [DPFedAvg, DPFedSAM])
@pytest.mark.parametrize(
    ("arguments", "secret"),
    [
        ({"sampling": HALF}, True),
        ({"evaluation": PrivateEvaluation(sampling=HALF, noise_multiplier=1.0)}, True),
        ({"sampling": FixedSizeSampling(cohort_size=2), "relation": "replace-one"}, True),
        ({"sampling": TwoOfThree()}, True),
        ({"sampling": FixedSizeSampling(cohort_size=3)}, False),
        ({}, False),
    ],
)
def test_what_is_published_tells_who_took_part_only_where_it_is_no_secret(arguments, secret, cls, tmp_path):
    """Metrics, times, and missing updates: of one round these are the cohort, if all fail."""
    strategy = cls(**WORDS | {"num_clients": 3} | arguments)
    grid = LocalGrid(shared_noise_app(), 3, tamper=lambda node, reply: [] if node == 3 else [reply])
    record_run(strategy, grid, model_arrays(linear()), num_rounds=4, config={}, path=tmp_path / "run")
    of_training = secret and "sampling" in arguments
    for report, line in zip(strategy.rounds, read_metrics(tmp_path / "run")[1:], strict=True):
        hidden = {"cohort-size", "replies", "bytes-down", "bytes-up", "seconds"}
        assert set(report.public()) == {"bytes-per-client", "epsilon"} | (set() if of_training else hidden)
        assert hidden & set(line) == (set() if of_training else hidden)
        assert ("elapsed" in line) is not secret
    assert any("did not count" in line for line in strategy.statement.incidents) is not of_training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "std"),
    # A share of the noise is that of four clients; of sparse messages that of the 1.6 that are expected, so of two.
    [({"sampling": HALF}, 2.0 / 2), ({"sampling": PoissonSampling(sampling_rate=0.4), "keep_ratio": 0.5}, 2.0 / math.sqrt(2))],
)
def test_instructions_do_not_tell_how_many_clients_take_part(arguments, std):
    strategy = DPFedSAM(**WORDS | arguments)
    grid = played(strategy, num_rounds=12)
    told = [wire.instruction_of(one.content.config_records["config"]) for one in grid.sent if asks_to_train(one)]
    assert len({report.cohort_size for report in strategy.rounds}) > 2
    assert len({json.dumps(table_of(one)) for one in told}) == 1
    assert told[0].ask.noise_std == pytest.approx(std)


@pytest.mark.parametrize("num_clients", [2, 10])
def test_a_participant_knows_its_own_share(num_clients):
    """With two clients half of the variance is known to each of them."""
    strategy = DPFedSAM(**WORDS | {"num_clients": num_clients})
    played(strategy, num_clients)
    against = {adversary.name: adversary for adversary in strategy.statement.adversaries}
    assert list(against) == ["outsiders", "participants", "the server"]
    assert against["participants"].lowest_noise_std == pytest.approx(2.0 * math.sqrt((num_clients - 1) / num_clients))
    assert against["outsiders"].lowest_noise_std == 2.0
    assert against["the server"].lowest_noise_std == pytest.approx(2.0 / math.sqrt(num_clients))
    assert [entry.trusted for entry in against.values()] == [False, False, True]
    assert strategy.statement.epsilon == against["participants"].epsilon > against["outsiders"].epsilon
    assert against["the server"].epsilon > strategy.statement.epsilon


class Moving(LocalGrid):
    """Other nodes are there after the first round of training."""

    later = ()

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        if any(asks_to_train(message) for message in messages):
            self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in self.later}
        return replies


@pytest.mark.parametrize(("later", "left_out"), [(range(1, 3), 2), (range(1, 9), 0)], ids=["two leave", "four come"])
def test_shares_without_a_trusted_server_are_those_of_the_plan_whoever_is_there(later, left_out):
    """Two of four who are left would each know half of the noise; of eight, each would add less than is said."""
    strategy = DPFedSAM(**WORDS, server_completes_noise=False)
    grid = Moving(shared_noise_app(), 4)
    grid.later = later
    strategy.start(grid, model_arrays(linear()), num_rounds=3)
    asked = [wire.instruction_of(one.content.config_records["config"]).ask for one in grid.sent if asks_to_train(one)]
    assert len(asked) == 4 + 2 * min(4, len(later))
    assert [one.noise_std for one in asked] == pytest.approx([2.0 / math.sqrt(3)] * len(asked))
    assert sum("was left out" in line for line in strategy.statement.incidents) == left_out
    event = accounting.repeated(GaussianDpEvent(4.0 * math.sqrt(2 / 3)), 3)
    exact = accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one").epsilon
    assert strategy.statement.epsilon == pytest.approx(exact)


def test_sampling_does_not_protect_against_the_server():
    """It draws the cohorts itself, and sees every share of the noise alone."""
    strategy = DPFedSAM(**WORDS | {"sampling": HALF})
    played(strategy, num_rounds=8)
    against = {adversary.name: adversary for adversary in strategy.statement.adversaries}
    event = accounting.repeated(GaussianDpEvent(2.0), 8)
    exact = accounting.epsilon(event, delta=1e-3, relation="add-or-remove-one").epsilon
    assert against["the server"].epsilon == pytest.approx(exact)


def test_adversaries_are_told_the_worst_clients_epsilon():
    budgets = {"c0": 0.5, "c1": 2.0, "c2": 1.0, "c3": 0.1}
    arguments = {"mechanism": "laplace", "clip_norm": 1.0, "num_replies": 3, "epsilon": budgets}
    strategy = FedSGDDPC(**arguments, num_clients=4, cohort_size=4, num_records=8, learning_rate=0.1)
    grid = grid_of(FedSGDDPCRecipe(**arguments), {name: records(name) for name in budgets})
    strategy.start(grid, model_arrays(linear()), num_rounds=3)
    statement = strategy.statement
    assert statement.epsilon == pytest.approx(2.0)
    assert {entry.epsilon for entry in statement.adversaries} == {statement.epsilon} == {statement.clients.maximum}
