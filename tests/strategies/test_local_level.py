import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.clients import ClientPolicy, FedSGDDPCRecipe, LocalDPClient, model_arrays
from flower_dp.clients.account import KEY, StateAccount
from flower_dp.clients.fedsgd_dpc import ClippedGradients
from flower_dp.clients.reasons import Declined
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from flower_dp.privacy.nbafl import weights_terms
from flower_dp.strategies import FedSGDDPC
from tests.asks import GONE, config_of, forged, own_ask, reasons, told
from tests.asks import ask as made
from tests.grids import LocalGrid
from tests.local_grids import NAMES, context_of, grid_of, linear, records, start, vector_of

WORDS = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 2.0}
FOUR = {name: records(name) for name in NAMES[:4]}


def server(**arguments):
    options = {"num_clients": 4, "cohort_size": 2, "num_records": 8, "learning_rate": 0.1, **WORDS}
    return FedSGDDPC(**options | arguments)


def asked_in_each_round(grid):
    rounds: dict[int, list[str]] = {}
    for message in grid.sent:
        if message.metadata.message_type == "train":
            instruction = wire.instruction_of(message.content.config_records["config"])
            rounds.setdefault(instruction.server_round, []).extend(instruction.clients)
    return rounds


# The server's ledgers


@pytest.mark.parametrize(("num_clients", "cohort_size", "num_rounds"), [(4, 2, 6), (4, 3, 5), (5, 2, 7), (3, 1, 4)])
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


def test_exhausting_one_budget_leaves_the_others_running():
    replies = {"c0": 1, "c1": 4, "c2": 4, "c3": 4}
    strategy = server(cohort_size=4, num_replies=replies)
    grid = grid_of(FedSGDDPCRecipe(**WORDS, num_replies=replies), FOUR)
    start(strategy, grid, 10)
    rounds = asked_in_each_round(grid)
    assert rounds == {1: ["c0", "c1", "c2", "c3"]} | {at: ["c1", "c2", "c3"] for at in (2, 3, 4)}
    assert "ended before round 5: every client's budget is spent" in strategy.incidents
    assert strategy.statement.clients.each == pytest.approx(dict.fromkeys(FOUR, 2.0))
    assert "3 times a client whose budget was spent was not asked" in str(strategy.statement)


def test_a_round_of_spent_clients_passes_and_the_run_goes_on():
    replies = {"c0": 1, "c1": 1, "c2": 3, "c3": 3}
    strategy = server(num_replies=replies)
    grid = grid_of(FedSGDDPCRecipe(**WORDS, num_replies=replies), FOUR)
    start(strategy, grid, 6)
    assert [report.cohort_size for report in strategy.rounds] == [2, 2, 0, 2, 0, 2]


def test_epsilon_of_rounds_never_falls_and_bounds_the_statement():
    strategy = server()
    start(strategy, grid_of(FedSGDDPCRecipe(**WORDS, num_replies=2), FOUR), 4)
    values = [report.epsilon for report in strategy.rounds]
    assert values == pytest.approx([1.0, 1.0, 2.0, 2.0])
    assert strategy.statement.epsilon <= values[-1]


def test_a_hundred_clients_are_listed_more_are_not():
    for count, listed in ((100, 100), (101, 0)):
        data = {f"c{index:03d}": FOUR["c0"] for index in range(count)}
        strategy = server(num_clients=count, cohort_size=count, num_replies=1)
        start(strategy, grid_of(FedSGDDPCRecipe(**WORDS, num_replies=1), data, num_nodes=2), 1)
        assert (strategy.statement.clients.count, len(strategy.statement.clients.each)) == (count, listed)


def test_weights_are_public_numbers_in_the_instruction():
    strategy = server(num_records={"c0": 1, "c1": 2, "c2": 3, "c3": 4}, num_replies=1)
    data = {name: records(name, size) for size, name in enumerate(FOUR, 1)}
    grid = grid_of(FedSGDDPCRecipe(**WORDS, num_replies=1), data, num_nodes=1)
    start(strategy, grid, 2)
    sent = [wire.instruction_of(m.content.config_records["config"]) for m in grid.sent if m.metadata.message_type == "train"]
    assert [{name: i.ask.own[name].weight for name in i.clients} for i in sent] == [
        pytest.approx({"c0": 0.2, "c1": 0.4}),
        pytest.approx({"c2": 0.6, "c3": 0.8}),
    ]


# Bad replies


def changed(message, change):
    """A reply with its payload's values changed."""
    (record,) = message.content.array_records.values()
    values = [np.array(array.numpy()) for array in record.values()]
    values[-1] = change(values[-1])
    message.content[next(iter(message.content.array_records))] = ArrayRecord(values)
    return message


@pytest.mark.parametrize(
    "arguments", [{"refused": {"why": [7]}}, {"refused": {"why": [1]}}, {"refused": {"why": ["c3"]}}, {"clients": ["c3"]}]
)
def test_names_that_were_not_asked_are_refused(arguments):
    """In an answer clients stand by their position among those asked, here one; it can't name who is in the sum."""

    def pretend(node, reply):
        if node != 1:
            return [reply]
        record = reply.content.config_records[wire.KEY]
        answer = json.loads(record[wire.KEY])
        answer |= arguments
        record[wire.KEY] = json.dumps(answer)
        return [reply]

    strategy = server(num_replies=1)
    start(strategy, grid_of(FedSGDDPCRecipe(**WORDS, num_replies=1), FOUR, tamper=pretend), 1)
    assert strategy.rounds[0].replies == 1


def test_a_sum_beyond_float32_leaves_the_model_as_it_was():
    """A step size that is, for float64, still a number."""
    strategy = server(num_replies=1, learning_rate=1e45)
    final = start(strategy, grid_of(FedSGDDPCRecipe(**WORDS, num_replies=1), FOUR), 1)
    torch.testing.assert_close(final, vector_of(linear()), rtol=0, atol=0)
    assert strategy.rounds[0].replies == 2
    assert any(line.startswith("round 1 was left out: array ") for line in strategy.incidents)
    assert strategy.rules.ledgers(strategy.charges)["c0"].num_charges == 1


@pytest.mark.parametrize("size", [3e38, 1e5])
def test_a_reply_longer_than_any_honest_one_does_not_move_the_model(size):
    """It is refused, and the run goes on with those of the others."""
    huge = lambda node, reply: [changed(reply, lambda values: np.full_like(values, size))] if node == 1 else [reply]  # noqa: E731
    recipe = FedSGDDPCRecipe(**WORDS | {"epsilon": math.inf}, num_replies=1)
    finals = []
    for tamper in (huge, lambda node, reply: [] if node == 1 else [reply]):
        strategy = server(epsilon=math.inf, cohort_size=4)
        finals.append(start(strategy, grid_of(recipe, FOUR, tamper=tamper), 1))
        assert strategy.rounds[0].replies == 3
    torch.testing.assert_close(*finals, rtol=0, atol=0)


@pytest.mark.slow
def test_honest_noise_is_never_too_long():
    """Of budgets and models small and large."""
    for epsilon, mechanism in ((1e-3, "laplace"), (50.0, "laplace"), (20.0, "gaussian")):
        arguments = {**WORDS, "mechanism": mechanism, "epsilon": epsilon, "delta": 0.0 if mechanism == "laplace" else 1e-5}
        strategy = server(**arguments, cohort_size=4, num_replies=3)
        start(strategy, grid_of(FedSGDDPCRecipe(**arguments, num_replies=3), FOUR, num_nodes=2), 3)
        assert [report.replies for report in strategy.rounds] == [4, 4, 4]


# The client's own account


def instruction(*, clients=("c0",), num_replies=(2,), server=None, clip_norm=0.5, noise_multiplier=0.0, own=None, **arguments):
    """What a server asks whose recipe is `server`, by default that of the clients; `own` is what it says of each of them."""
    agreed = [
        FedSGDDPCRecipe(**WORDS | (server or {}), num_replies=number).terms(name, records(name))
        for name, number in zip(clients, num_replies, strict=True)
    ]
    said = {"weight": 1.0} | (own or {})
    each = {
        name: (
            said["weight"],
            said.get("terms", terms.kind),
            said.get("noise_multiplier", terms.release.mechanism.noise_multiplier),
        )
        for name, terms in zip(clients, agreed, strict=True)
    }
    asked = own_ask(each, clip_norm=clip_norm, noise_multiplier=noise_multiplier)
    return wire.Instruction(**{"server_round": 1, "method": "fedsgd-dpc", "clients": clients} | arguments, ask=asked)


def client(state, *, recipe=None, policy=None, names=("c0",)):
    return LocalDPClient(
        model=linear(),
        clients={name: records(name) for name in names},
        recipe=recipe or FedSGDDPCRecipe(**WORDS, num_replies=2),
        context=context_of(state),
        policy=policy,
        device="cpu",
    )


def ask(state, *, recipe=None, policy=None, names=("c0",), table=None, **arguments):
    """Make a new client on an old state, ask it, and return who replied, who refused, and the row.

    `table` has keys of the ask that no honest server sends.
    """
    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    table, asked = table or {}, instruction(**arguments)
    text = forged(asked, **table)
    arrays, _, answer = client(state, recipe=recipe, policy=policy, names=names).fit(parameters, config_of(text))
    refused = reasons(wire.Answer.from_json(answer[wire.KEY], asked.clients))
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
    assert StateAccount(state).replies("c0") == 2


def test_a_lie_about_replies_or_clip_is_refused_and_costs_nothing():
    state = RecordDict()
    assert "terms (100 replies, " in ask(state, num_replies=(100,))[1]["c0"]
    assert "clip_norm=500: is not this client's own" in ask(state, clip_norm=500.0)[1]["c0"]
    assert StateAccount(state).replies("c0") == 0


GAUSSIAN = {"mechanism": "gaussian", "delta": 1e-5, "sampling_rate": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "client", "why"),
    [
        ({"epsilon": 1.0}, {"epsilon": 50.0}, "noise_multiplier=4: by this client's own budget it is less"),
        ({"epsilon": 1.0}, {"epsilon": 1.001}, "noise_multiplier=4: by this client's own budget it is less"),
        ({}, {"relation": "add-or-remove-one", "num_records": 8}, "record, replace-one, "),
        ({}, GAUSSIAN, "2 replies, Laplace, "),
        (GAUSSIAN, GAUSSIAN | {"sampling_rate": 1.0}, "PoissonSampling(sampling_rate=0.5) of 8"),
        (GAUSSIAN, GAUSSIAN | {"delta": 1e-2}, "by this client's own budget it is less"),
    ],
)
def test_a_client_with_less_noise_or_other_terms_than_the_server_states_does_not_reply(server, client, why):
    """The statement's epsilon of this client would be too small."""
    state = RecordDict()
    recipe = FedSGDDPCRecipe(**WORDS | client, num_replies=2)
    clients, refused, row = ask(state, recipe=recipe, server=server)
    assert clients == ()
    assert why in refused["c0"]
    assert not row.any()
    assert StateAccount(state).replies("c0") == 0


def test_a_client_with_more_noise_than_the_server_states_replies():
    recipe = FedSGDDPCRecipe(**WORDS | {"epsilon": 1.0}, num_replies=2)
    assert ask(RecordDict(), recipe=recipe, server={"epsilon": 2.0})[0] == ("c0",)


def test_a_server_that_names_no_terms_gets_no_reply():
    for own, why in (
        ({"own": {}}, "own: has no terms of 1 of 1 clients"),
        (told("c1"), "own: has no terms of 1 of 1 clients"),
        *((told("c0", **{field: GONE}), f"missing required field {field}") for field in ("terms", "noise_multiplier", "weight")),
    ):
        state = RecordDict()
        with pytest.raises(ValueError, match=why):
            ask(state, table=own)
        assert StateAccount(state).replies("c0") == 0


def test_a_server_that_names_noise_for_clients_to_add_gets_no_reply():
    """Theirs follows from their own budgets; and a policy of some noise on the device can't be kept here."""
    state = RecordDict()
    with pytest.raises(ValueError, match=r"noise_std=1e-09, .*: must be 0, 1 and 0 for placement='local'"):
        ask(state, table={"noise_std": 1e-9})
    with pytest.raises(ValueError, match=r"min_noise_std=0\.1: this client's noise follows from its own budget alone"):
        ask(state, policy=ClientPolicy(max_clip_norm=0.5, min_noise_std=0.1))
    assert StateAccount(state).replies("c0") == 0


@pytest.mark.parametrize(
    "reported",
    [{"placement": "central"}, {"placement": "central", "noise_multiplier": 0.0}, {"placement": "distributed", "noise_std": 0.5}],
)
def test_a_server_of_another_placement_gets_no_reply_under_the_methods_own_name(reported):
    """It would state what its own noise costs, or that of shares; and an account would pay for that."""
    state = RecordDict()
    asked = wire.Instruction(server_round=1, method="fedsgd-dpc", clients=("c0",), ask=made(clip_norm=0.5, size=18, **reported))
    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    with pytest.raises(
        Declined, match=f"placement='{reported['placement']}': this client's messages are private on its own terms"
    ):
        client(state).fit(parameters, config_of(asked))
    assert StateAccount(state).replies("c0") == 0


def test_replies_made_of_the_same_state_by_clients_made_anew_never_repeat_noise():
    """No generator outlives a reply: nothing to be copied with the client."""
    rows = {ask(RecordDict())[2].tobytes() for _ in range(10)}
    assert len(rows) == 10


def test_an_error_in_a_clients_data_tells_the_server_its_kind_alone():
    class Lazy(dict):
        def __getitem__(self, name):
            if name == "c0":
                return super().__getitem__(name)
            raise self.error

    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    for error in (ValueError("could not convert 'Jane Doe'"), OSError("Jane Doe.csv")):
        data = Lazy({name: records(name) for name in ("c0", "c1")})
        data.error = error
        recipe = FedSGDDPCRecipe(**WORDS, num_replies=2)
        node = LocalDPClient(model=linear(), clients=data, recipe=recipe, context=context_of(), device="cpu")
        _, _, config = node.fit(parameters, {wire.KEY: instruction(clients=("c0", "c1"), num_replies=(2, 2)).to_json()})
        answer = wire.Answer.from_json(config[wire.KEY], ("c0", "c1"))
        assert reasons(answer) == {"c1": "training failed; the node's own log says why"}


def test_the_servers_numbers_do_not_move_the_noise():
    """The row's distribution follows from the client's own terms: what the server says of the noise is not used."""
    release = FedSGDDPCRecipe(**WORDS, num_replies=2).terms("c0", records("c0")).release
    scale = release.noise_scale / release.expected_cohort
    rows = np.concatenate([ask(RecordDict(), noise_multiplier=0.0, own={"noise_multiplier": 1e-9})[2] for _ in range(120)])
    # The gradient's mean is at most clip_norm / 18 a coordinate on average; 2,160 draws, 5 sigma and that.
    assert np.abs(rows).mean() / scale == pytest.approx(1.0, abs=5 / math.sqrt(rows.size) + 0.02)


def test_weights_are_applied_after_the_noise():
    seeds = [LocalDPClient(model=linear(), clients={"c0": records("c0")}, recipe=FedSGDDPCRecipe(**WORDS, num_replies=2),
                           context=context_of(), device="cpu", noise_seed=1) for _ in range(2)]  # fmt: skip
    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    plain, heavy = (
        one.fit(parameters, {wire.KEY: instruction(own={"weight": weight}).to_json()})[0][-1]
        for one, weight in zip(seeds, (1.0, 4.0), strict=True)
    )
    np.testing.assert_allclose(heavy, 4 * plain, rtol=1e-6)


def test_an_account_that_was_opened_on_other_terms_pays_nothing():
    state = RecordDict()
    ask(state)
    clients, refused, _ = ask(
        state, recipe=FedSGDDPCRecipe(**WORDS | {"epsilon": 100.0}, num_replies=2), server={"epsilon": 100.0}
    )
    assert clients == ()
    assert "opened on other terms" in refused["c0"]


def test_a_damaged_account_pays_nothing():
    state = RecordDict()
    ask(state)
    state[KEY] = ConfigRecord({"clients": ["c0"], "replies": [], "terms": []})
    with pytest.raises(ValueError, match="is damaged"):
        ask(state)


def test_a_client_without_an_account_does_not_reply():
    recipe = FedSGDDPCRecipe(**WORDS, num_replies=2)
    made = LocalDPClient(model=linear(), clients={"c0": records("c0")}, recipe=recipe, device="cpu")
    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    with pytest.raises(ValueError, match="this client has no account"):
        made.fit(parameters, {wire.KEY: instruction().to_json()})


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
            seen.append(StateAccount(state).replies("c0"))
            raise RuntimeError("disk gone")

    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    recipe = FedSGDDPCRecipe(**WORDS, num_replies=2)
    broken = LocalDPClient(model=linear(), clients={"c0": Broken()}, recipe=recipe, context=context_of(state), device="cpu")
    arrays, _, config = broken.fit(parameters, {wire.KEY: instruction().to_json()})
    assert set(seen) == {1}
    assert StateAccount(state).replies("c0") == 1
    # No record can make the client fall silent, not even all of them: the reply is noise.
    answer = wire.Answer.from_json(config[wire.KEY], ("c0",))
    assert answer.refused == {}
    assert arrays[-1].any()
    assert "disk gone" not in config[wire.KEY]


def test_buffers_do_not_carry_data_from_client_to_client():
    class Watched(ClippedGradients):
        def _row(self, vector, job):
            found.append(self.model.module.seen.clone())
            self.model.module.seen += job.records.inputs.mean()
            if len(found) == 2:
                raise RuntimeError("broken")
            return ClippedGradients._row(self, vector, job)

    class Keeping(FedSGDDPCRecipe):
        def pipeline(self, release, **arguments):
            made = super().pipeline(release, **arguments)
            train = Watched(**{field.name: getattr(made.train, field.name) for field in fields(made.train)})
            return replace(made, train=train)

    found = []
    model = linear()
    model.register_buffer("seen", torch.zeros(()))
    names = ("c0", "c1", "c2")
    node = LocalDPClient(
        model=model,
        clients={name: records(name) for name in names},
        recipe=Keeping(**WORDS, num_replies=2),
        context=context_of(),
        device="cpu",
    )
    parameters = [array.numpy() for array in model_arrays(linear()).values()]
    node.fit(parameters, {wire.KEY: instruction(clients=names, num_replies=(2, 2, 2)).to_json()})
    assert found == [0.0, 0.0, 0.0]
    assert float(node.model.module.seen) == 0.0


def test_a_policy_is_asked_first():
    state = RecordDict()
    with pytest.raises(ValueError, match=r"policy allows at most 0\.1"):
        ask(state, policy=ClientPolicy(max_clip_norm=0.1))
    assert StateAccount(state).replies("c0") == 0


def test_the_account_lives_in_each_nodes_context_through_a_run():
    grid = grid_of(FedSGDDPCRecipe(**WORDS, num_replies=2), FOUR, num_nodes=2)
    start(server(), grid, 4)
    found = [StateAccount(context.state) for context in grid.contexts.values()]
    assert [account.replies(name) for account in found for name in FOUR if account.replies(name)] == [2] * 4
    # A second run on the same nodes' state is refused, whatever a new server believes: three rounds without a reply end it.
    with pytest.raises(RuntimeError, match="budget is spent"):
        start(server(), grid, 4)


def test_numpy_client_through_flowers_own_client_app():
    """The state comes from the context that client_fn receives."""
    recipe = FedSGDDPCRecipe(**WORDS, num_replies=2)

    def client_fn(context: Context):
        name = f"c{int(context.node_config['partition-id'])}"
        one = LocalDPClient(model=linear(), clients={name: FOUR[name]}, recipe=recipe, context=context, device="cpu")
        assert isinstance(one, NumPyClient)
        return one.to_client()

    grid = LocalGrid(ClientApp(client_fn=client_fn), 4)
    strategy = server()
    start(strategy, grid, 4)
    assert all(report.replies == 2 for report in strategy.rounds)
    assert [StateAccount(grid.contexts[node].state).replies(f"c{node - 1}") for node in range(1, 5)] == [2] * 4


def test_terms_tell_each_other_apart():
    arguments = {"mechanism": "laplace", "clip_norm": 0.5, "epsilon": 2.0, "delta": 0.0, "num_replies": 2, "num_records": 8}
    texts = {gradient_terms(**arguments).text}
    for change in (
        {"clip_norm": 0.6},
        {"epsilon": 2.1},
        {"num_replies": 3},
        {"num_records": 9},
        {"relation": "add-or-remove-one"},
    ):
        texts.add(gradient_terms(**arguments | change).text)
    assert len(texts) == 6


def test_terms_of_different_numbers_of_replies_differ_where_their_noise_does_not():
    arguments = {"clip_norm": 1.5, "paper_epsilon": 2.0, "delta": 0.01, "uplink_exposures": 4, "min_records": 8}
    few, many = weights_terms(**arguments, num_replies=4), weights_terms(**arguments, num_replies=5)
    assert few.release == many.release
    assert few.kind != many.kind
    assert few.text != many.text
