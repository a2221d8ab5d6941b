"""A device's node-config wins over the server's run-config, for the package's own app and for one's own model."""

from dataclasses import fields

import pytest
from flwr.app import Context, RecordDict

from flower_dp.apps import client_app
from flower_dp.apps.device_settings import hosted, own_settings
from flower_dp.apps.methods import table_of
from flower_dp.apps.settings import Evaluation, key_of
from flower_dp.methods import METHODS
from tests.apps.test_methods import DEFAULTS

SMALL = {"num-clients": 4, "num-rounds": 2, "partition": "sample", "records-per-client": 20, "training-engine": "one-by-one"}
LAPLACE = {**SMALL, "method": "fedsgd-dpc", "sampling": "round-robin", "cohort-size": 4, "fedsgd-dpc.epsilon": 100.0}
LAPLACE.pop("training-engine")
# A device that has settings of its own says itself which records its clients have.
HERE = {"partition": "sample", "records-per-client": 20}
FEDAVG = {**SMALL, "method": "dp-fedavg", "sampling": "full", "dp-fedavg.noise-multiplier": 0.9, "dp-fedavg.delta": 1e-3}


def context_of(run_config, **own):
    return Context(1, 1, {"partition-id": 0, "num-partitions": 4, **own}, RecordDict(), {**DEFAULTS, **run_config})


def client_of(run_config, **own):
    return client_app.client_fn(context_of(run_config, **(HERE if own else {}), **own))


def terms_of(client):
    ((name, records),) = client.clients.items()
    return client.recipe.terms(name, records)


def test_a_budget_of_the_devices_own_wins():
    # Laplace under replace-one: 2 R / epsilon, R = 2 replies.
    assert terms_of(client_of(LAPLACE)).release.mechanism.noise_multiplier == pytest.approx(0.04)
    mine = {"fedsgd-dpc.epsilon": 1, "fedsgd-dpc.num-replies": 3}
    assert terms_of(client_of(LAPLACE, **mine)).release.mechanism.noise_multiplier == pytest.approx(6.0)
    assert terms_of(client_of(LAPLACE, **mine)).num_replies == 3


@pytest.mark.parametrize("method", ["dp-fedpaq", "scaffold"])
def test_the_papers_noise_of_the_server_is_not_that_of_a_device_with_a_budget(method):
    """Its own epsilon is then of all replies, whatever the server's is of."""
    run = {**LAPLACE, "method": method, "sampling": "full", "cohort-size": 0, "batch-size": 2}
    table = {f"{method}.epsilon": 2.0, f"{method}.num-local-steps": 2, f"{method}.sensitivity": "per-step"}
    honest = client_of({**run, **table})
    paper = {**run, **table, f"{method}.calibration": "paper"}
    tricked = client_of(paper, **table)
    assert terms_of(tricked).text == terms_of(honest).text
    assert terms_of(tricked).epsilon == 2
    trusting = terms_of(client_of(paper)).release.mechanism.noise_multiplier
    assert trusting < 0.9 * terms_of(honest).release.mechanism.noise_multiplier


@pytest.mark.parametrize("method", METHODS)
def test_a_table_is_all_the_devices_or_all_the_servers(method):
    table = {f"{method}.{key_of(field.name)}": field.default for field in fields(table_of(method))}
    servers = {key: f"the server's {key}" for key in table} | {"method": method, "report-client-metrics": True, "seed": 3}
    assert own_settings(servers, {"partition-id": 0}) == servers
    evaluation = {f"private-evaluation.{key_of(field.name)}": field.default for field in fields(Evaluation)}
    for key in table:
        mine = {key: "mine", "report-client-metrics": False} | ({"min-separation": 3} if method == "dp-ftrl" else {})
        assert own_settings(servers, mine) == {**table, **evaluation, **mine, "method": method, "seed": 3}


def test_a_method_for_which_the_device_has_set_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"method='dp-fedavg': this device's node-config has settings for fedsgd-dpc, nbafl, and"
    ):
        client_of(FEDAVG, **{"fedsgd-dpc.epsilon": 1.0, "nbafl.paper-epsilon": 1.0})


def test_nonsense_in_a_node_config_is_refused_naming_the_key():
    with pytest.raises(ValueError, match="num-partitions: is missing from the node-config"):
        hosted({"partition-id": 0})
    with pytest.raises(ValueError, match=r"fedsgd-dpc\.epsilom=1\.0: unknown setting; did you mean fedsgd-dpc.epsilon"):
        client_of(LAPLACE, **{"fedsgd-dpc.epsilom": 1.0})
    with pytest.raises(ValueError, match=r"fedsgd-dpc\.epsilon='1': must be of type float"):
        client_of(LAPLACE, **{"fedsgd-dpc.epsilon": "1"})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("evaluation.every", "private-evaluation.every"),
        ("privat-evaluation.epsilon", "epsilon"),
        ("nbaf.paper-epsilon", "nbafl.paper-epsilon"),
        ("num-client", "num-clients"),
        ("report-client-metric", "report-client-metrics"),
    ],
)
def test_a_misspelled_setting_of_a_device_is_refused_and_the_servers_value_is_not_used(key, meant):
    """It would count as another app's key, and a device that sets nothing else would take all that the server has set."""
    server = {**LAPLACE, "private-evaluation.every": 1, "private-evaluation.epsilon": 9.0, "report-client-metrics": True}
    with pytest.raises(ValueError, match=f"{key}: unknown setting in this device's node-config; did you mean .*{meant}?"):
        own_settings(server, {"partition-id": 0, "num-partitions": 4, "ledger-path": "x", key: 0})


def test_keys_of_other_apps_are_no_settings_of_a_device():
    assert own_settings(LAPLACE, {"partition-id": 0, "hospital": "a", "model.path": "x"}) == LAPLACE


def test_metrics_stay_where_the_device_says_so():
    asked = {**FEDAVG, "report-client-metrics": True}
    assert client_of(asked).policy.allow_metrics
    assert not client_of(asked, **{"report-client-metrics": False}).policy.allow_metrics


@pytest.mark.parametrize(
    ("node", "epsilon", "every"),
    [
        ({}, 9.0, 2),
        ({"nbafl.paper-epsilon": 2.0}, 0.0, 0),
        ({"private-evaluation.every": 2, "private-evaluation.epsilon": 0.5}, 0.5, 2),
        ({"nbafl.paper-epsilon": 2.0, "private-evaluation.every": 2, "private-evaluation.epsilon": 0.5}, 0.5, 2),
    ],
)
def test_a_device_that_sets_anything_evaluates_by_its_own_settings_alone(node, epsilon, every):
    run = {"method": "nbafl", "nbafl.paper-epsilon": 50.0, "private-evaluation.every": 2, "private-evaluation.epsilon": 9.0}
    own = own_settings(run, node)
    assert (own["private-evaluation.epsilon"], own["private-evaluation.every"]) == (epsilon, every)


@pytest.mark.parametrize(("key", "lie"), [("min-separation", 1), ("max-participations", 99), ("num-rounds", 9)])
def test_the_server_does_not_decide_how_often_a_device_takes_part(key, lie):
    """The worth of a row of correlated noise depends on that."""
    run, node = {"method": "dp-ftrl", key: lie}, {"num-partitions": 4, "dp-ftrl.noise-multiplier": 2.0, "min-separation": 3}
    node.pop(key, None)
    with pytest.raises(ValueError, match=rf"{key}.*: how often this device takes part, and so what the noise is worth"):
        own_settings(run, node)
    assert own_settings(run, {**node, key: lie})[key] == lie
    assert own_settings(run, {"num-partitions": 4, "batch-size": 3})[key] == lie  # it has set no noise of its own
