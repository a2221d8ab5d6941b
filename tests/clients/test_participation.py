"""Clients that keep a minimum separation: their own count of participations, in the node's state or in a ledger file."""

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.clients import ClientPolicy, DPClient, TensorRecords, privacy_mod
from flower_dp.clients.account import KEY, LEDGER_PATH, NodeStateAccounts
from flower_dp.clients.participation import ParticipationTerms, refusals
from flower_dp.clients.refusal_messages import Declined
from flower_dp.core import checks, dp_events
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.privacy.client_terms import num_replies_of
from flower_dp.privacy.device_store import DeviceLedger, ReplyNumber, owner_of, participation_account
from flower_dp.wire import DECLINED, REPEATED, Instruction, Promise, ReplyHeader, Separation
from tests.asks import answered, ask, config_of, replace
from tests.closed_forms import gaussian_epsilon
from tests.local_grids import TRAINING, Direct, context_of
from tests.stock import arrays

RUN, OTHER_RUN = "5eed", "0ff"
MULTIPLIER, DELTA = 1.6, 1e-5
ROW = np.array([0.5, -0.25], np.float32)


def separated(number: int, *, run: str = RUN, names: tuple[str, ...] = ("a",), **changes: Any) -> Instruction:
    """What a server asks in a round of DP-FTRL with two participations of a client, three rounds apart."""
    kept = {"number": number, "min_separation": 3, "max_participations": 2, "whole_run": True, "run": run}
    kept |= {name: changes.pop(name) for name in tuple(changes) if name in kept}
    arguments = {"server_round": number, "method": "dp-ftrl"}
    arguments |= {name: changes.pop(name) for name in ("server_round", "method") if name in changes}
    asked = ask(size=2, separation=Separation(**kept), **{"noise_multiplier": MULTIPLIER} | changes)
    return Instruction(clients=names, ask=asked, **arguments)


def unseparated(**changes: Any) -> Instruction:
    return Instruction(clients=("a",), ask=ask(size=2, **changes), server_round=1, method="dp-fedavg")


# Both kinds of clients: what they refuse, and what leaves them

Sent = tuple[dict[str, wire.Refusal], np.ndarray]


class Watched:
    """Records that tell when they are used."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._records = look, TensorRecords(inputs=torch.from_numpy(ROW[None]), targets=torch.zeros(1))

    def __len__(self) -> int:
        self._look()
        return len(self._records)

    def __getattr__(self, name: str) -> Any:
        self._look()
        return getattr(self._records, name)


def hosted(
    instruction: Instruction,
    context: Context | None,
    *,
    names: tuple[str, ...] = ("a",),
    look: Callable[[], None] = lambda: None,
    policy: ClientPolicy | None = None,
) -> Sent:
    """Ask this package's client, a new object for every message, as Flower makes it."""
    records: Any = {name: Watched(look) for name in names}
    client = DPClient(model=Direct(2), clients=records, training=TRAINING, policy=policy, context=context, device="cpu")
    payload, _, answer = client.fit([np.zeros(2, np.float32)], config_of(instruction))
    header = ReplyHeader.from_json(answer[wire.KEY], instruction.clients)
    return dict(header.refused), np.asarray(payload[0], np.float64)


def wrapped(
    instruction: Instruction,
    context: Context | None,
    *,
    look: Callable[[], None] = lambda: None,
    policy: ClientPolicy | None = None,
) -> Sent:
    """Ask an app of others behind the mod, a new one for every message."""
    app = ClientApp(mods=[privacy_mod(name="a", policy=policy)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        look()
        return Message(RecordDict({"arrays": arrays(w=ROW)}), reply_to=message)

    message = wire.train_message(1, wire.MESSAGE_API, arrays(w=np.zeros(2, np.float32)), {}, instruction)
    content = answered(app(message, context_of() if context is None else context)).content
    header = ReplyHeader.from_json(str(content[wire.KEY][wire.KEY]), instruction.clients)
    sent: Any = content["arrays"]
    return dict(header.refused), np.asarray(next(iter(sent.values())).numpy(), np.float64)


every_kind = pytest.mark.parametrize("client", [hosted, wrapped])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return DeviceLedger.create(tmp_path / "ledger.sqlite", ["a", "b"]).path


def restarted(path: Path | None) -> Context:
    """A node whose state is empty, as it is after a restart, and its owner's ledger, if there is one."""
    return context_of(**({} if path is None else {LEDGER_PATH: str(path)}))


def counted(context: Context, name: str = "a", run: str = RUN) -> int:
    """Return the participations by the account that the context says."""
    account = participation_account(name, run)
    if (path := context.node_config.get(LEDGER_PATH)) is None:
        return NodeStateAccounts(context.state).replies(account)
    entry = DeviceLedger(str(path)).read().get(account)
    return 0 if entry is None else entry.replies


EARLY = f"reply in round 3 of run {RUN} would be the second within 3 rounds"


@every_kind
@pytest.mark.parametrize("on_device", [False, True], ids=["the node's state", "a ledger"])
def test_a_request_too_early_or_one_too_many_is_refused_and_nothing_leaves(client: Any, on_device: bool, path: Path) -> None:
    context = restarted(path if on_device else None)
    replied = []
    for number in (1, 3, 4, 7):
        refused, row = client(separated(number), context)
        replied.append(not refused)
        assert row.any() == (not refused)
        if refused:
            assert refused["a"].code == DECLINED
            assert refused["a"].reason == (EARLY if number == 3 else "max_participations=2: all of them were counted")
        else:
            np.testing.assert_allclose(row, ROW, atol=2e-3)
    assert replied == [True, False, True, False]
    assert counted(context) == 2


@every_kind
@pytest.mark.parametrize("on_device", [False, True], ids=["the node's state", "a ledger"])
def test_a_number_that_was_counted_is_refused_as_a_repeated_one(client: Any, on_device: bool, path: Path) -> None:
    """The server resumed from an older copy of its state, and would add the same noise again."""
    context = restarted(path if on_device else None)
    assert client(separated(5), context)[0] == {}
    for number in (5, 4, 1):
        refused, row = client(separated(number), context)
        assert refused["a"].code == REPEATED
        assert f"reply {'' if on_device else 'in round '}{number} of run {RUN}" in refused["a"].reason
        assert not row.any()
    assert counted(context) == 1
    assert client(separated(8), context)[0] == {}


@given(separation=st.integers(1, 5), most=st.none() | st.integers(1, 4), numbers=st.lists(st.integers(1, 15), max_size=12))
def test_any_requests_in_any_order(separation: int, most: int | None, numbers: list[int]) -> None:
    """Against a count by hand."""
    assert_by_hand(context_of(), separation, most, numbers)


@pytest.mark.slow
@given(separation=st.integers(1, 5), most=st.none() | st.integers(1, 4), numbers=st.lists(st.integers(1, 15), max_size=8))
@settings(max_examples=25)
def test_any_requests_in_any_order_with_a_ledger(
    tmp_path_factory: pytest.TempPathFactory, separation: int, most: int | None, numbers: list[int]
) -> None:
    ledger = DeviceLedger.create(tmp_path_factory.mktemp("ledger") / "ledger.sqlite", ["a"])
    assert_by_hand(restarted(ledger.path), separation, most, numbers, restarts=True)


def assert_by_hand(context: Context, separation: int, most: int | None, numbers: list[int], *, restarts: bool = False) -> None:
    taken: list[int] = []
    for number in numbers:
        if restarts:
            context.state.clear()
        asked = separated(number, min_separation=separation, max_participations=most)
        refused = refusals(asked, ["a"], context)
        may = (not taken or number >= taken[-1] + separation) and len(taken) < (most or math.inf)
        assert (refused == {}) == may
        if may:
            taken.append(number)
        else:
            assert (refused["a"].code == REPEATED) == (bool(taken) and number <= taken[-1])
        assert counted(context) == len(taken)


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("on_device", [False, True], ids=["the node's state", "a ledger"])
@pytest.mark.parametrize(
    "changed",
    [
        {"min_separation": 1},
        {"min_separation": 4},
        {"max_participations": 20},
        {"max_participations": None},
        {"whole_run": False},
        {"noise_multiplier": 1.5},
        {"noise_multiplier": 0.0},
        {"method": "dp-fedavg"},
    ],
    ids=str,
)
def test_terms_that_change_within_a_run_are_refused(client: Any, on_device: bool, changed: Any, path: Path) -> None:
    """More participations, or less noise, than those that the client was charged for."""
    context = restarted(path if on_device else None)
    assert client(separated(1), context)[0] == {}
    refused, row = client(separated(9, **changed), context)
    assert refused["a"].reason == "the server's terms of this run have changed"
    assert not row.any()
    assert counted(context) == 1
    assert client(separated(9, run=OTHER_RUN, **changed), context)[0] == {}  # another run has terms of its own
    assert client(separated(9), context)[0] == {}


@every_kind
def test_a_clip_norm_may_change(client: Any) -> None:
    """It is adaptive; the noise multiplier is that of all rounds."""
    context = context_of()
    for number, clip_norm in ((1, 1.0), (4, 0.5)):
        assert client(separated(number, clip_norm=clip_norm), context)[0] == {}


def test_a_refusal_tells_the_device_more_than_the_server(caplog: pytest.LogCaptureFixture) -> None:
    context = context_of()
    hosted(separated(2), context)
    hosted(separated(4), context)
    assert f"Client {participation_account('a', RUN)}: no reply: reply in round 4 of run {RUN}" in caplog.text
    assert "the last one was in round 2" in caplog.text
    hosted(separated(9, min_separation=1), context)
    assert "they were 2 replies to dp-ftrl, min_separation=3" in caplog.text
    assert "and are 2 replies to dp-ftrl, min_separation=1" in caplog.text


# The id of the run


@every_kind
@pytest.mark.parametrize("run", ["", "run", "5EED", "5eed\n", "5eed, run 1", "5eed ", "é", "-1"])
def test_an_empty_or_odd_run_id_is_refused(client: Any, run: str) -> None:
    """A participation that counts under no run, or under another account's name, does not count."""
    context = context_of()
    with pytest.raises(ValueError, match=r"run='.*': must be the id of a run, by which participations count"):
        client(separated(1, run=run), context, look=lambda: pytest.fail("a record was read"))
    assert KEY not in context.state


def test_a_long_run_id_is_shortened_in_the_refusal() -> None:
    with pytest.raises(Declined, match="must be the id of a run") as refused:
        refusals(separated(1, run="x" * 10_000), ["a"], context_of())
    assert len(str(refused.value)) < 200


def test_a_client_without_a_context_is_refused() -> None:
    """Its past participations are not known."""
    with pytest.raises(ValueError, match="context: this client has no account"):
        hosted(separated(1), None, look=lambda: pytest.fail("a record was read"))
    assert refusals(unseparated(), ["a"], None) == {}


@every_kind
@pytest.mark.parametrize("on_device", [False, True], ids=["the node's state", "a ledger"])
def test_runs_count_apart(client: Any, on_device: bool, path: Path) -> None:
    context = restarted(path if on_device else None)
    for number, run in itertools.product((1, 4), (RUN, OTHER_RUN)):
        assert client(separated(number, run=run), context)[0] == {}
    assert [counted(context, run=run) for run in (RUN, OTHER_RUN)] == [2, 2]
    assert all(client(separated(7, run=run), context)[0] for run in (RUN, OTHER_RUN))


def test_clients_of_one_node_count_apart() -> None:
    """The one that may not take part is left out, and the other's row is sent alone."""
    context, both = context_of(), ("a", "b")
    assert hosted(separated(1, names=("b",)), context, names=both)[0] == {}
    refused, row = hosted(separated(2, names=both), context, names=both)
    assert set(refused) == {"b"}
    np.testing.assert_allclose(row, ROW, atol=2e-3)
    refused, row = hosted(separated(5, names=both), context, names=both)
    assert refused == {}
    np.testing.assert_allclose(row, 2 * ROW, atol=4e-3)
    assert [counted(context, name) for name in both] == [2, 2]


@every_kind
def test_clients_of_other_nodes_are_not_counted(client: Any) -> None:
    context = context_of()
    refused, _ = client(separated(1, names=("a", "elsewhere")), context)
    assert {name: refusal.reason for name, refusal in refused.items()} == {"elsewhere": "not hosted here"}
    assert counted(context) == 1
    assert counted(context, "elsewhere") == 0


def test_a_client_with_the_name_of_another_account_is_refused() -> None:
    """Client `a, run 5eed` would be charged for the participations of client `a`."""
    for name in ("a, run 5eed", "a, evaluation"):
        with pytest.raises(Declined, match=f"client '{name}': its name is that of another account"):
            refusals(separated(1, names=(name,)), [name], context_of())
    assert owner_of(participation_account("a", RUN)) == "a"
    assert owner_of("a, run of the mill") == "a, run of the mill"


# The charge comes first


@every_kind
@pytest.mark.parametrize("on_device", [False, True], ids=["the node's state", "a ledger"])
def test_a_participation_is_counted_before_any_record_is_read(client: Any, on_device: bool, path: Path) -> None:
    """A node that dies in training, or whose reply is lost, has taken part."""
    context = restarted(path if on_device else None)
    for times, number in enumerate((1, 4), 1):
        seen: list[int] = []
        client(separated(number), context, look=lambda seen=seen: seen.append(counted(context)))
        assert set(seen) == {times}
    refused, _ = client(separated(7), context, look=lambda: pytest.fail("a record was read"))
    assert set(refused) == {"a"}


@every_kind
def test_a_failed_training_is_counted(client: Any) -> None:
    context = context_of()

    def fail() -> None:
        raise OSError("no record can be read")

    refused, row = client(separated(1), context, look=fail)
    assert set(refused) == {"a"}
    assert not row.any()
    assert counted(context) == 1
    assert set(client(separated(3), context)[0]) == {"a"}


# The ledger of the device's owner


@every_kind
def test_a_ledger_counts_over_restarts(client: Any, path: Path) -> None:
    """The node's state is empty each time; without a ledger the client would take part again."""
    results = [not client(separated(number), restarted(path))[0] for number in (1, 2, 3, 4, 4, 7)]
    assert results == [True, False, False, True, False, False]
    assert [not client(separated(number), restarted(None))[0] for number in (1, 2)] == [True, True]


@every_kind
def test_the_ledger_has_the_event_of_the_whole_run_once(client: Any, path: Path) -> None:
    """Correlated noise: all participations together are one Gaussian of the noise multiplier that the server promises."""
    whole = dp_events.GaussianDpEvent(MULTIPLIER)
    assert client(separated(1), restarted(path))[0] == {}
    assert DeviceLedger(path).read()[participation_account("a", RUN)].counts == {whole: 1}  # there may be no second round
    assert client(separated(4), restarted(path))[0] == {}
    entries = DeviceLedger(path).read()
    assert set(entries) == {"a", "b", participation_account("a", RUN)}
    entry = entries[participation_account("a", RUN)]
    assert (entry.replies, entry.num_replies, entry.relation, entry.runs) == (2, 2, "add-or-remove-one", {RUN: 4})
    assert entry.counts == {whole: 1, dp_events.NoOpDpEvent(): 1}
    assert entry.spent.lines() == [f"1 x GaussianDpEvent(noise_multiplier={MULTIPLIER})"]
    by_hand = gaussian_epsilon([MULTIPLIER], "add-or-remove-one", DELTA)
    assert by_hand <= entry.spent.cost(DELTA).epsilon <= by_hand * 1.01
    assert entries["a"].replies == entries["b"].replies == 0  # the accounts of runs whose noise is the client's own


@every_kind
def test_independent_noise_costs_each_time(client: Any, path: Path) -> None:
    for number in (1, 4):
        assert client(separated(number, whole_run=False), restarted(path))[0] == {}
    entry = DeviceLedger(path).read()[participation_account("a", RUN)]
    assert entry.counts == {dp_events.GaussianDpEvent(MULTIPLIER): 2}
    by_hand = gaussian_epsilon([MULTIPLIER] * 2, "add-or-remove-one", DELTA)
    assert by_hand <= entry.spent.cost(DELTA).epsilon <= by_hand * 1.01


@pytest.mark.parametrize("whole_run", [False, True])
def test_a_run_without_noise_costs_infinity(whole_run: bool, path: Path) -> None:
    for number in (1, 4):
        asked = separated(number, whole_run=whole_run, noise_multiplier=0.0, placement="central")
        assert refusals(asked, ["a"], restarted(path)) == {}
        assert DeviceLedger(path).read()[participation_account("a", RUN)].spent.cost(DELTA).epsilon == math.inf


@every_kind
def test_a_ledger_that_cannot_be_used_sends_nothing(client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = DeviceLedger.create(tmp_path / "ledger.sqlite", ["somebody"]).path
    for _ in range(2):
        refused, row = client(separated(1), restarted(path))
        assert refused["a"].reason == "its ledger can't be used; the node's own log says why"
        assert not row.any()
        path.unlink(missing_ok=True)
    assert "has no account of client 'a'; it is the ledger of somebody" in caplog.text
    assert "does not exist" in caplog.text


@every_kind
def test_an_older_copy_put_back_during_a_run_sends_nothing(client: Any, path: Path, tmp_path: Path) -> None:
    """The node's state, which lasts one run, remembers the file's count."""
    context = restarted(path)
    shutil.copy(path, tmp_path / "copy")
    assert client(separated(1), context)[0] == {}
    shutil.copy(tmp_path / "copy", path)
    path.with_name(path.name + ".mark").unlink()
    refused, row = client(separated(4), context)
    assert "its ledger can't be used" in refused["a"].reason
    assert not row.any()


@every_kind
def test_a_device_with_a_ledger_refuses_runs_without_separation(client: Any, path: Path) -> None:
    """Their replies would not be counted."""
    context = restarted(path)
    with pytest.raises(ValueError, match="ledger-path: this client keeps no account, so its replies would not be counted"):
        client(unseparated(), context, look=lambda: pytest.fail("a record was read"))
    assert client(unseparated(), context_of())[0] == {}
    evaluation = Instruction(
        clients=("a",), ask=ask(size=3, metrics=MetricBounds(bounds={"loss": 1.0})), server_round=1, method=wire.EVALUATION
    )
    with pytest.raises(Declined, match="ledger-path"):
        refusals(evaluation, ["a"], context)


def test_names_of_participation_accounts_are_no_names_of_clients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names='a, run 5eed': must not end with"):
        DeviceLedger.create(tmp_path / "ledger.sqlite", ["a", "a, run 5eed"])


# The policy


NOISE = {"min_noise_multiplier": 1.0}


@every_kind
@pytest.mark.parametrize(
    ("policy", "changes", "reason"),
    [
        ({"min_separation": 3}, {}, None),
        ({"min_separation": 4}, {}, "min_separation=3: this client's policy requires at least 4"),
        ({"max_participations": 2}, {}, None),
        ({"max_participations": 1}, {}, "max_participations=2: this client's policy allows at most 1"),
        (
            {"max_participations": 10**6},
            {"max_participations": None},
            "max_participations=inf: this client's policy allows at most",
        ),
        ({"min_noise_multiplier": 5.0}, {}, "noise_multiplier=1.6: this client's policy requires at least 5"),
    ],
)
def test_a_policy_limits_separation_and_participations(client: Any, policy: Any, changes: Any, reason: str | None) -> None:
    """A declined request is not counted: nothing was released."""
    context, limits = context_of(), ClientPolicy(**NOISE | policy)
    if reason is None:
        assert client(separated(1, **changes), context, policy=limits)[0] == {}
        return
    with pytest.raises(ValueError, match=f"^declined: {reason}"):
        client(separated(1, **changes), context, policy=limits, look=lambda: pytest.fail("a record was read"))
    assert KEY not in context.state


@every_kind
@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"min_separation": 1}, "min_separation=0: this client's policy requires at least 1"),
        ({"max_participations": 10**6}, "max_participations=inf: this client's policy allows at most 1000000"),
    ],
)
def test_such_a_policy_refuses_runs_without_separation(client: Any, policy: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^declined: {reason}"):
        client(unseparated(), context_of(), policy=ClientPolicy(**NOISE | policy))


@pytest.mark.parametrize("name", ["min_separation", "max_participations"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_limits_of_a_policy_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value}: must be a whole number >= 1"):
        ClientPolicy(**{name: value})
    with pytest.raises(Declined, match="none of its noise; set min_noise_multiplier too"):
        ClientPolicy(**{name: 1}).check(separated(1).ask)


# Terms and numbers


def terms(number: int = 1, **changes: Any) -> ParticipationTerms:
    asked = separated(number, **changes)
    kept = asked.ask.separation
    assert kept is not None
    return ParticipationTerms(method=asked.method, promise=asked.ask.promise, separation=kept)


def test_different_terms_have_different_lines_which_begin_with_the_number_of_replies() -> None:
    lines = [
        terms(**changes).text
        for changes in (
            {},
            {"method": "dp-fedavg"},
            {"min_separation": 4},
            {"max_participations": 3},
            {"max_participations": None},
            {"whole_run": False},
            {"noise_multiplier": MULTIPLIER * (1 + 1e-15)},
        )
    ]
    assert len(set(lines)) == len(lines)
    assert [num_replies_of(line) for line in lines] == [2, 2, 2, 3, checks.MOST_COUNT, 2, 2]
    assert terms().text == terms(number=9, run=OTHER_RUN, clip_norm=0.5).text


@pytest.mark.parametrize(("last", "number", "early"), [(0, 1, False), (1, 2, True), (1, 3, True), (1, 4, False), (7, 9, True)])
def test_a_reply_is_early_within_the_separation(last: int, number: int, early: bool) -> None:
    reason = ReplyNumber(run=RUN, number=number, separation=3).early_reason(last)
    assert (reason is not None) == early
    if reason is not None:
        assert reason.public == f"reply in round {number} of run {RUN} would be the second within 3 rounds"
        assert reason.own == f"{reason.public}; the last one was in round {last}"
        assert not reason.repeated
    assert ReplyNumber(run=RUN, number=number).early_reason(last) is None  # clients with terms of their own keep none


@pytest.mark.parametrize(
    "last",
    [[], [1, 2], [-1], ["x"], None],
    ids=["none", "two", "negative", "text", "missing"],
)
def test_a_state_without_the_number_of_the_last_reply_is_damaged(last: Any) -> None:
    context = context_of()
    assert refusals(separated(1), ["a"], context) == {}
    record = dict(context.state.config_records[KEY])
    record |= {"last": last} if last is not None else {}
    if last is None:
        del record["last"]
    context.state[KEY] = ConfigRecord(record)
    with pytest.raises(Declined, match="is damaged; the number of replies sent is not known"):
        refusals(separated(9), ["a"], context)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"number": 0}, "separation number=0: must be a whole number >= 1"),
        ({"min_separation": 0}, "min_separation=0: must be a whole number >= 1"),
        ({"max_participations": 0}, "max_participations=0: must be a whole number >= 1"),
    ],
)
def test_values_out_of_range_are_no_separation(changes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        Separation(**{"number": 1, "min_separation": 1} | changes)


def test_clients_with_noise_of_their_own_and_evaluations_have_no_separation() -> None:
    asked = separated(1).ask
    with pytest.raises(ValueError, match="separation: must be set for the training of client-level methods alone"):
        replace(asked, placement="local", step=0.0)
    with pytest.raises(ValueError, match="separation: must be set for the training of client-level methods alone"):
        replace(asked, promise=Promise(clip_norm=1.0, noise_multiplier=1.0), metrics=MetricBounds(bounds={"loss": 1.0}))
    assert asked.with_run_id("abc").separation == replace(asked.separation, run="abc")


def test_a_policy_for_a_whole_run_refuses_its_noise_in_each_round() -> None:
    policy = ClientPolicy(min_noise_multiplier=MULTIPLIER, whole_run=True)
    policy.check(separated(1).ask)
    for asked in (separated(1, whole_run=False), unseparated(noise_multiplier=MULTIPLIER)):
        with pytest.raises(Declined, match="whole_run=False: this client's policy requires noise of which one event covers all"):
            policy.check(asked.ask)
    ClientPolicy(min_noise_multiplier=MULTIPLIER).check(separated(1, whole_run=False).ask)
    with pytest.raises(ValueError, match="whole_run"):
        ClientPolicy(whole_run=1)  # type: ignore[arg-type]


def test_only_central_noise_is_that_of_a_whole_run() -> None:
    with pytest.raises(ValueError, match="whole_run: must be set for placement='central' alone"):
        separated(1, placement="distributed", noise_std=1.0)
    separated(1, placement="distributed", noise_std=1.0, whole_run=False)
