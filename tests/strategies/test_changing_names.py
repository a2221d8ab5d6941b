"""Clients that are named by their nodes' ids, which change when a node starts anew, are not counted by name over several runs."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients import NbAFLTerms, privacy_mod
from flower_dp.privacy.store import Store
from flower_dp.strategies import NbAFL
from flower_dp.strategies.population.client_manager import KnownClients
from tests.grids import LocalGrid
from tests.stock import arrays

DELTA = 1e-3
TERMS = NbAFLTerms(clip_norm=1.0, epsilon=2.0, delta=DELTA, min_records=8, num_records=8, num_replies=1)
MODEL = arrays(w=np.zeros(4, np.float32))


def app(**words):
    made = ClientApp(mods=[privacy_mod(**words)])

    @made.train()
    def train(message: FlowerMessage, context: Context) -> FlowerMessage:
        content = RecordDict({"arrays": arrays(w=np.full(4, 0.1, np.float32)), "metrics": MetricRecord({"num-examples": 8})})
        return FlowerMessage(content, reply_to=message)

    return made


def grid_of(start, app_of_all, **config):
    """Nodes that have started anew: their ids are others than before, and the devices the same."""
    grid = LocalGrid(app_of_all, 0)
    for device in range(3):
        node = start + device
        node_config = {"device": device} | {key: value(device) for key, value in config.items()}
        grid.contexts[node] = Context(run_id=1, node_id=node, node_config=node_config, state=RecordDict(), run_config={})
    return grid


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
    for start in STARTS:
        with pytest.raises(ValueError, match=f"ledger: client 'node-{start}' is named by its node's id, which changes when"):
            nbafl(ledger=path).start(grid_of(start, app(terms=TERMS)), MODEL, num_rounds=1)
    with Store(path, read_only=True) as ledger:
        assert not ledger.num_charges


def test_names_that_change_have_no_joint_epsilon():
    strategy = nbafl()
    for number, start in enumerate(STARTS, start=1):
        strategy.start(grid_of(start, app(terms=TERMS)), MODEL, num_rounds=1)
        assert strategy.statement.epsilon == pytest.approx(2.0, rel=1e-3)
        assert any(line.startswith("NAMES CHANGE: ") for line in strategy.statement.not_covered)
        assert strategy.statement.joint is None if number == 1 else strategy.statement.joint.epsilon >= composed(number)
    assert strategy.statement.joint.epsilon == math.inf
    named = app(terms=TERMS, name=lambda context: f"device-{context.node_config['device']}")
    strategy.start(grid_of(5, named), MODEL, num_rounds=1)
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
