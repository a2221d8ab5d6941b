"""A server that lies in the run-config to a device with settings of its own, whose app is pinned."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from flower_dp.apps import client_app, user_app
from flower_dp.apps.device_settings import own_settings
from flower_dp.apps.methods import table_of
from flower_dp.apps.settings import DEALT, FUNCTIONS, Settings, key_of
from flower_dp.methods import METHODS
from tests.apps.test_methods import DEFAULTS

OWN = {"nbafl.paper-epsilon": 1.0, "nbafl.delta": 1e-3, "nbafl.uplink-exposures": 2}
SERVERS = {"method": "nbafl", "num-clients": 4, "num-rounds": 2, "sampling": "full", "batch-size": 8}
# What a device that sets a budget says of its data, in the package's own app.
HERE = {"partition": "sample", "records-per-client": 20}
ROOT = Path(__file__).parents[2]


def load_records(client, num_clients):
    return torch.zeros(20, 3), torch.zeros(20, dtype=torch.int64)


def hosted(run_config, **node):
    """The client of a node of somebody's own app."""
    node = {"partition-id": 0, "num-partitions": 4, **node}
    context = Context(1, 1, node, RecordDict(), {**SERVERS, **run_config})
    return user_app.client_of(lambda: nn.Linear(3, 2), load_records, nn.functional.cross_entropy, context)


def dealt(run_config, **node):
    """The client of a node of the package's own app."""
    node = {"partition-id": 0, "num-partitions": 4, **node}
    return client_app.client_fn(Context(1, 1, node, RecordDict(), {**DEFAULTS, **SERVERS, **HERE, **run_config}))


@pytest.mark.parametrize("lie", [100, 1, 3])
def test_the_server_does_not_decide_how_many_clients_a_device_hosts(lie):
    """The device's epsilon 1 once became 100, on the same records: every name had a budget of its own."""
    assert list(hosted({}, **OWN).clients) == ["client-0"]
    for made, arguments in ((hosted, OWN), (dealt, OWN | HERE)):
        with pytest.raises(
            ValueError, match=rf"num-clients={lie}: this device has settings of its own, and hosts one client of "
        ):
            made({"num-clients": lie}, **arguments)


def test_a_device_hosts_several_clients_where_it_says_so():
    for servers in (8, 400):
        assert list(hosted({"num-clients": servers}, **OWN, **{"num-clients": 8}).clients) == ["client-0", "client-4"]
    assert len(hosted({"num-clients": 400}).clients) == 100  # it has set nothing


@pytest.mark.parametrize("key", ["partition-id", "num-partitions"])
@pytest.mark.parametrize("value", ["", "a", 1.5, math.nan, True, -1, 4])
def test_a_node_config_that_does_not_say_whom_a_node_hosts_is_refused_by_its_key(key, value):
    match = "must be a whole number" if type(value) is not int else "must be 0 to 3, below num-partitions=4"
    if type(value) is not int or key == "partition-id":
        with pytest.raises(ValueError, match=rf"{key}={re.escape(repr(value))}: {match}"):
            hosted({}, **{key: value})


LIES = {
    "task": "fashion-mnist",
    "data-dir": "torchvision:/tmp/anywhere",
    "partition": "label-shards",
    "dirichlet-alpha": 0.01,
    "classes-per-client": 1,
    "records-per-client": 60_000,
    "validation-ratio": 0.4,
    "test-ratio": 0.4,
    "seed": 7,
}


@pytest.mark.parametrize("key", DEALT)
def test_the_server_does_not_decide_which_records_a_client_has(key):
    assert LIES.keys() == set(DEALT)
    run = {**DEFAULTS, **SERVERS, "partition": "iid", "records-per-client": 0, key: LIES[key]}
    node = {"partition-id": 0, "num-partitions": 4, **OWN}
    with pytest.raises(ValueError, match=rf"{key}={re.escape(repr(LIES[key]))}: .* set {key} in its node-config"):
        own_settings(run, node, dealt=True)
    assert own_settings(run, {**node, key: "mine"}, dealt=True)[key] == "mine"
    assert own_settings(run, {"partition-id": 0, "num-partitions": 4}, dealt=True)[key] == LIES[key]


def test_records_are_those_of_the_device():
    with pytest.raises(ValueError, match="seed=7: which records this device's clients have is not the server's to decide"):
        dealt({"seed": 7}, **OWN, **HERE)
    client = dealt({"records-per-client": 60_000}, **OWN, **HERE | {"records-per-client": 30})
    assert [len(records) for records in client.clients.values()] == [30]
    assert client.recipe.min_records == 30  # which NbAFL's noise is made for


@pytest.mark.parametrize("key", ["sampling", "sampling-rate", "cohort-size"])
@pytest.mark.parametrize("method", METHODS)
def test_the_server_does_not_decide_how_much_of_the_noise_is_a_devices_share(method, key):
    lie = {"sampling": "full", "sampling-rate": 0.9, "cohort-size": 4}[key]
    run = {"method": method, "num-clients": 4, key: lie}
    node = {"num-partitions": 4, f"{method}.clip-norm": 1.0} | ({"min-separation": 3} if method == "dp-ftrl" else {})
    if not any(field.name == "placement" for field in fields(table_of(method))):
        assert own_settings(run, node)[key] == lie
        return
    # Under central placement no noise is the device's.
    assert own_settings(run, {**node, f"{method}.placement": "central"})[key] == lie
    node[f"{method}.placement"] = "distributed"
    with pytest.raises(ValueError, match=rf"{key}={lie!r}: how much noise this device adds is not the server's to decide"):
        own_settings(run, node)
    assert own_settings(run, {**node, key: lie})[key] == lie


@pytest.mark.parametrize("method", METHODS)
def test_the_server_does_not_decide_for_how_many_rounds_an_epsilon_is(method):
    """With a run-config of one round it would take little noise for a device's epsilon."""
    run = {"method": method, "num-clients": 4, "num-rounds": 1}
    node = {"num-partitions": 4, f"{method}.epsilon": 2.0}
    if not any(field.name == "noise_multiplier" for field in fields(table_of(method))):
        assert own_settings(run, node)[f"{method}.epsilon"] == 2.0
        return
    with pytest.raises(ValueError, match=rf"{method}\.epsilon=2: the noise would follow from the number of rounds"):
        own_settings(run, node)


@pytest.mark.parametrize("num_rounds", [1, 3, 100])
@pytest.mark.parametrize("mine", [{"nbafl.num-replies": 25}, {"nbafl.num-replies": 25, "nbafl.uplink-exposures": 5}, {}])
def test_the_server_does_not_decide_for_how_many_replies_a_papers_epsilon_is(mine, num_rounds):
    """With a run-config of one round, 25 replies once had the noise that is made for one."""
    client = hosted({"num-rounds": num_rounds}, **{"nbafl.paper-epsilon": 1.0, "nbafl.delta": 1e-3}, **mine)
    terms = client.recipe.terms("client-0", client.clients["client-0"])
    of_one = math.sqrt(2 * math.log(1.25 / 1e-3)) * 2 / 20  # c (2 C / m) / epsilon, in clip norms
    assert terms.num_replies == mine.get("nbafl.num-replies", num_rounds)
    made_for = mine.get("nbafl.uplink-exposures", terms.num_replies)
    assert terms.release.mechanism.noise_multiplier == pytest.approx(made_for * of_one)


def test_shared_noise_is_that_of_the_devices_own_cohort():
    own = {"fed-smp.noise-multiplier": 1.0, "fed-smp.delta": 1e-3, "fed-smp.clip-norm": 1.0, "sampling": "full"}
    run = {"method": "fed-smp", "sampling": "poisson"}
    # A share of 4 clients: 1 / sqrt(4).
    assert hosted(run, **own).policy.min_noise_std == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    "mine",
    [
        OWN,
        {"private-evaluation.every": 2, "private-evaluation.epsilon": 0.5},
        {"num-clients": 4},
        {"data-fn": "", "learning-rate": 0.1},
    ],
    ids=["a budget", "evaluation", "num-clients", "two others"],
)
def test_a_device_that_sets_anything_sends_no_metrics_unasked(mine):
    """A server's `report-client-metrics=true` once got the exact training loss of a device that had set only its budget."""
    asked = {"report-client-metrics": True, "private-evaluation.every": 2, "private-evaluation.epsilon": 9.0}
    assert hosted(asked).policy.allow_metrics
    client = hosted(asked, **mine)
    assert not client.policy.allow_metrics
    budget = client.evaluation_budget
    assert (budget.epsilon if budget else None) == mine.get("private-evaluation.epsilon")
    assert hosted(asked, **mine, **{"report-client-metrics": True}).policy.allow_metrics


def test_what_a_node_config_does_not_mean_for_the_app_sets_nothing():
    run = {"method": "nbafl", "report-client-metrics": True}
    assert own_settings(run, {"partition-id": 0, "num-partitions": 9, "ledger-path": "/ledger.sqlite", "a.b": 1}) == run


def test_the_page_says_of_every_setting_whose_word_counts():
    page = (ROOT / "docs" / "deployment.md").read_text()
    table = page.partition("### What a device takes from the server")[2].partition("\n## ")[0]
    answer = set(re.findall(r"`([a-z-]+)`", table))
    keys = {key_of(field.name) for field in fields(Settings)} - {"evaluation"} | {"private-evaluation"} | set(FUNCTIONS)
    assert not keys - answer
