import math

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from flower_dp import wire
from flower_dp.clients import ClientPolicy, FedSGDDPCRecipe, LocalDPClient, model_arrays
from flower_dp.clients.account import KEY, NodeStateAccounts
from flower_dp.clients.refusal_messages import Declined
from flower_dp.privacy.nbafl import weights_terms
from flower_dp.strategies import FedSGDDPC
from tests.asks import GONE, config_of, forged, own_ask, reasons, told
from tests.asks import ask as made
from tests.local_grids import NAMES, context_of, filled, grid_of, linear, records, start

WORDS = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 2.0}
FOUR = {name: records(name) for name in NAMES[:4]}


def server(**arguments):
    options = {"num_clients": 4, "cohort_size": 2, "num_records": 8, "learning_rate": 0.1, **WORDS}
    return FedSGDDPC(**options | arguments)


# The server's ledgers


@pytest.mark.parametrize(("num_clients", "cohort_size", "num_rounds"), [(4, 3, 5), (5, 2, 7)])
def test_round_robin_is_balanced_and_never_exceeds_ceil_bt_over_n(num_clients, cohort_size, num_rounds):
    data = {name: records(name) for name in NAMES[:num_clients]}
    most = math.ceil(cohort_size * num_rounds / num_clients)
    strategy = server(num_clients=num_clients, cohort_size=cohort_size)
    grid = grid_of(FedSGDDPCRecipe(**WORDS, num_replies=most), data)
    start(strategy, grid, num_rounds)
    counts = [strategy.rules.ledgers(strategy.charges)[name].num_charges for name in data]
    assert sum(counts) == cohort_size * num_rounds
    assert max(counts) == most
    assert max(counts) - min(counts) <= 1
    assert strategy.statement.epsilon <= 2.0
    assert all(report.replies == cohort_size for report in strategy.rounds)


def test_a_hundred_clients_are_listed_more_are_not():
    for count, listed in ((100, 100), (101, 0)):
        data = {f"c{index:03d}": FOUR["c0"] for index in range(count)}
        strategy = server(num_clients=count, cohort_size=count, num_replies=1)
        start(strategy, grid_of(FedSGDDPCRecipe(**WORDS, num_replies=1), data, num_nodes=2), 1)
        assert (strategy.statement.clients.count, len(strategy.statement.clients.by_client)) == (count, listed)


# Bad replies


@pytest.mark.parametrize("size", [3e38, 1e5])
def test_a_reply_longer_than_any_honest_one_does_not_move_the_model(size):
    """It is refused, and the run goes on with those of the others."""
    recipe = FedSGDDPCRecipe(**WORDS | {"epsilon": math.inf}, num_replies=1)
    finals = []
    for tamper in (filled(size), lambda node, reply: [] if node == 1 else [reply]):
        strategy = server(epsilon=math.inf, cohort_size=4)
        finals.append(start(strategy, grid_of(recipe, FOUR, tamper=tamper), 1))
        assert strategy.rounds[0].replies == 3
    torch.testing.assert_close(*finals, rtol=0, atol=0)


# The client's own account


def instruction(*, clients=("c0",), num_replies=(2,), server=None, clip_norm=0.5, noise_multiplier=0.0, said=None, **arguments):
    """What a server asks whose recipe is `server`, by default that of the clients; `said` is the noise multiplier that it tells."""
    each = {}
    for name, number in zip(clients, num_replies, strict=True):
        terms = FedSGDDPCRecipe(**WORDS | (server or {}), num_replies=number).terms(name, records(name))
        each[name] = (1.0, terms.fingerprint, terms.release.mechanism.noise_multiplier if said is None else said)
    asked = own_ask(each, clip_norm=clip_norm, noise_multiplier=noise_multiplier)
    return wire.Instruction(**{"server_round": 1, "method": "fedsgd-dpc", "clients": clients} | arguments, ask=asked)


PARAMETERS = [array.numpy() for array in model_arrays(linear()).values()]
RECIPE = FedSGDDPCRecipe(**WORDS, num_replies=2)


def client(state=None, *, recipe=RECIPE, policy=None, names=("c0",), data=None, **arguments):
    data = {name: records(name) for name in names} if data is None else data
    common = {"model": linear(), "clients": data, "recipe": recipe, "policy": policy, "device": "cpu"}
    return LocalDPClient(**common | {"context": context_of(state)} | arguments)


def ask(state, *, recipe=RECIPE, policy=None, names=("c0",), table=None, **arguments):
    """Make a new client on an old state, ask it, and return who replied, who refused, and the row.

    `table` has keys of the ask that no honest server sends.
    """
    asked = instruction(**arguments)
    text = forged(asked, **table or {})
    arrays, _, answer = client(state, recipe=recipe, policy=policy, names=names).fit(PARAMETERS, config_of(text))
    refused = reasons(wire.ReplyHeader.from_json(answer[wire.KEY], asked.clients))
    return tuple(name for name in asked.clients if name not in refused), refused, arrays[-1]


def test_a_client_refuses_what_it_cannot_pay_whatever_the_server_says():
    state = RecordDict()
    for _ in range(2):
        assert ask(state)[0] == ("c0",)
    # Asked again, in the same round, in an earlier and in a later one; each time by a client object made anew.
    for server_round in (1, 2, 100):
        clients, refused, row = ask(state, server_round=server_round)
        assert clients == ()
        assert refused == {"c0": "its budget is spent: num_replies=2, all of them sent"}
        assert not row.any()
    # Lies about the number of replies, either way.
    for lie in (3, 1):
        clients, refused, row = ask(state, num_replies=(lie,))
        assert clients == ()
        assert not row.any()
        assert f"the server's terms ({lie} replies, Laplace" in refused["c0"]
    assert NodeStateAccounts(state).replies("c0") == 2


GAUSSIAN = {"mechanism": "gaussian", "delta": 1e-5, "sampling_rate": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "own", "why"),
    [
        ({"num_replies": (100,)}, {}, "terms (100 replies, "),
        ({"clip_norm": 500.0}, {}, "clip_norm=500: is not this client's own"),
        ({"server": {"epsilon": 1.0}}, {"epsilon": 1.001}, "noise_multiplier=4: by this client's own budget it is less"),
        ({}, {"relation": "add-or-remove-one", "num_records": 8}, "record, replace-one, "),
        ({}, GAUSSIAN, "2 replies, Laplace, "),
        ({"server": GAUSSIAN}, GAUSSIAN | {"sampling_rate": 1.0}, "PoissonSampling(sampling_rate=0.5) of 8"),
        ({"server": GAUSSIAN}, GAUSSIAN | {"delta": 1e-2}, "by this client's own budget it is less"),
    ],
)
def test_a_client_with_less_noise_or_other_terms_than_the_server_states_does_not_reply(asked, own, why):
    """The statement's epsilon of this client would be too small."""
    state = RecordDict()
    clients, refused, row = ask(state, recipe=FedSGDDPCRecipe(**WORDS | own, num_replies=2), **asked)
    assert clients == ()
    assert why in refused["c0"]
    assert not row.any()
    assert NodeStateAccounts(state).replies("c0") == 0


def test_a_client_with_more_noise_than_the_server_states_replies():
    recipe = FedSGDDPCRecipe(**WORDS | {"epsilon": 1.0}, num_replies=2)
    assert ask(RecordDict(), recipe=recipe, server={"epsilon": 2.0})[0] == ("c0",)


def test_a_server_that_names_no_terms_gets_no_reply():
    for own, why in (
        ({"own": {}}, "own: has no terms of 1 of 1 clients"),
        (told("c0", terms=GONE), "missing required field terms"),
    ):
        state = RecordDict()
        with pytest.raises(ValueError, match=why):
            ask(state, table=own)
        assert NodeStateAccounts(state).replies("c0") == 0


def test_a_server_that_names_noise_for_clients_to_add_gets_no_reply():
    """Theirs follows from their own budgets; and a policy of some noise on the device can't be kept here."""
    state = RecordDict()
    with pytest.raises(ValueError, match=r"noise_std=1e-09, .*: must be 0, 1 and 0 for placement='local'"):
        ask(state, table={"noise_std": 1e-9})
    with pytest.raises(ValueError, match=r"min_noise_std=0\.1: this client's noise follows from its own budget alone"):
        ask(state, policy=ClientPolicy(max_clip_norm=0.5, min_noise_std=0.1))
    assert NodeStateAccounts(state).replies("c0") == 0


@pytest.mark.parametrize(
    "reported", [{"placement": "central", "noise_multiplier": 0.0}, {"placement": "distributed", "noise_std": 0.5}]
)
def test_a_server_of_another_placement_gets_no_reply_under_the_methods_own_name(reported):
    """It would state what its own noise costs, or that of shares; and an account would pay for that."""
    state = RecordDict()
    asked = wire.Instruction(server_round=1, method="fedsgd-dpc", clients=("c0",), ask=made(clip_norm=0.5, size=18, **reported))
    with pytest.raises(
        Declined, match=f"placement='{reported['placement']}': must be 'local', since this client adds all noise by its own terms"
    ):
        client(state).fit(PARAMETERS, config_of(asked))
    assert NodeStateAccounts(state).replies("c0") == 0


def test_an_error_in_a_clients_data_tells_the_server_its_kind_alone():
    class Lazy(dict):
        def __getitem__(self, name):
            if name == "c0":
                return super().__getitem__(name)
            raise self.error

    for error in (ValueError("could not convert 'Jane Doe'"), OSError("Jane Doe.csv")):
        data = Lazy({name: records(name) for name in ("c0", "c1")})
        data.error = error
        node = client(data=data)
        _, _, config = node.fit(PARAMETERS, {wire.KEY: instruction(clients=("c0", "c1"), num_replies=(2, 2)).to_json()})
        answer = wire.ReplyHeader.from_json(config[wire.KEY], ("c0", "c1"))
        assert reasons(answer) == {"c1": "training failed; the node's own log says why"}


def test_an_account_that_was_opened_on_other_terms_pays_nothing():
    state = RecordDict()
    ask(state)
    other = FedSGDDPCRecipe(**WORDS | {"epsilon": 100.0}, num_replies=2)
    clients, refused, _ = ask(state, recipe=other, server={"epsilon": 100.0})
    assert clients == ()
    assert "opened on other terms" in refused["c0"]


def test_a_damaged_account_pays_nothing():
    state = RecordDict()
    ask(state)
    state[KEY] = ConfigRecord({"clients": ["c0"], "replies": [], "terms": []})
    with pytest.raises(ValueError, match="is damaged"):
        ask(state)


def test_a_client_without_an_account_does_not_reply():
    made = client(context=None)
    with pytest.raises(ValueError, match="this client has no account"):
        made.fit(PARAMETERS, {wire.KEY: instruction().to_json()})


def test_hosted_clients_have_accounts_of_their_own():
    state, names = RecordDict(), ("c0", "c1")
    recipe = FedSGDDPCRecipe(**WORDS, num_replies={"c0": 1, "c1": 2})
    for expected in (("c0", "c1"), ("c1",), ()):
        clients, refused, _ = ask(state, recipe=recipe, names=names, clients=names, num_replies=(1, 2))
        assert clients == expected
        assert set(refused) == set(names) - set(expected)


def test_the_charge_is_on_the_state_before_records_are_touched():
    state, seen = RecordDict(), []

    class Broken:
        def __len__(self):
            return 8

        def batch(self, positions, device):
            seen.append(NodeStateAccounts(state).replies("c0"))
            raise RuntimeError("disk gone")

    arrays, _, config = client(state, data={"c0": Broken()}).fit(PARAMETERS, {wire.KEY: instruction().to_json()})
    assert set(seen) == {1}
    assert NodeStateAccounts(state).replies("c0") == 1
    # No record can make the client fall silent, not even all of them: the reply is noise.
    answer = wire.ReplyHeader.from_json(config[wire.KEY], ("c0",))
    assert answer.refused == {}
    assert arrays[-1].any()
    assert "disk gone" not in config[wire.KEY]


def test_a_policy_is_asked_first():
    state = RecordDict()
    with pytest.raises(ValueError, match=r"policy allows at most 0\.1"):
        ask(state, policy=ClientPolicy(max_clip_norm=0.1))
    assert NodeStateAccounts(state).replies("c0") == 0


def test_terms_of_different_numbers_of_replies_differ_where_their_noise_does_not():
    arguments = {"clip_norm": 1.5, "paper_epsilon": 2.0, "delta": 0.01, "uplink_exposures": 4, "min_records": 8}
    few, many = weights_terms(**arguments, num_replies=4), weights_terms(**arguments, num_replies=5)
    assert few.release == many.release
    assert few.fingerprint != many.fingerprint
    assert few.text != many.text
