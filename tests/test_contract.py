"""The contract of every method: what `tests/contracts.py` lists.

Each entry has a run of its own, from which its statement, its charges and its noise are read. Where the code is shared, the methods
of `KINDS` stand for all; a new entry is one of them, unless it says that it is a variant of others.

Statistical tests have fixed sizes and a false-alarm rate of 1e-6 for each comparison, and must reject a scale that is 5 % wrong.
Their models are wide and their clients' updates zero, so that what is released is noise alone, on the real way from client to
server. Where a scale is 5 % wrong, 18,000 draws of Gaussian noise pass for right less often than once in 50,000.
"""

import copy
import json
import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import cloudpickle
import numpy as np
import pytest
from dp_accounting import DpEvent, SelfComposedDpEvent
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from scipy import stats

import flower_dp.strategies
from flower_dp import wire
from flower_dp.clients import client_app, model_arrays
from flower_dp.strategies import DPFedAvg, DPStrategy, PrivateEvaluation
from flower_dp.strategies.not_covered import OTHER_RUNS
from tests.adversaries.fuzzing import THOROUGH, Lines
from tests.asks import answered
from tests.chance import chance_of
from tests.charges import Kept, assert_charges_are_the_ledgers
from tests.closed_forms import gaussian_delta, gaussian_epsilon
from tests.contract_runs import (
    SEED,
    SIZE,
    SMALL,
    STILL,
    Run,
    WatchedGrid,
    evaluating_stock_app,
    grid_of,
    run_of,
    start,
    still_data,
    still_model,
)
from tests.contracts import METHODS, SAMPLERS, Method, Words, shares
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import linear

FALSE_ALARM = 1e-6


def some_methods(condition: Callable[[Method], bool]) -> Any:
    return pytest.mark.parametrize("method", [one for one in METHODS if condition(one)], ids=lambda method: method.label)


def each_with(values: Iterable[Any], name: str, every: int = 2, condition: Callable[[Method], bool] = lambda _: True) -> Any:
    """Methods of each kind with some of these values in turn, each value with some methods; all with all if tests are thorough."""
    methods = [one for one in METHODS if (THOROUGH or not one.variant) and condition(one)]
    pairs = [
        pytest.param(method, value, id=f"{method.label}-{value}")
        for place, method in enumerate(methods)
        for number, value in enumerate(values)
        if THOROUGH or (place + number) % every == 0
    ]
    return pytest.mark.parametrize(("method", name), pairs)


# One method of each kind: the entries that are no variants of others.
KINDS = [method.label for method in METHODS if not method.variant]
# Variants whose statement and noise are those of another entry, with other names.
NAMESAKES = {"dp-fedavg, BLURS", "dp-fedsam central", "dp-fedsam untrusted"}
own_noise = some_methods(lambda method: method.label not in NAMESAKES)
of_each_kind = some_methods(lambda method: not method.variant)
# Where a client is missing, corrections of SCAFFOLD carry noise of earlier rounds into later ones: tests/strategies/test_scaffold.py.
fresh_rounds = some_methods(lambda method: not method.variant and not method.carries_noise)
own_clients_of_each_kind = some_methods(lambda method: not method.variant and method.client is not None)


def silent(*nodes: int) -> Callable[[int, Message], list[Message]]:
    """Nodes whose replies never arrive."""
    return lambda node, reply: [] if node in nodes else [reply]


# The noise of a run


def increments(method: Method, run: Run) -> np.ndarray:
    """What each round of a still model has released [rounds x d]."""
    models = np.stack(run.models).astype(np.float64)
    return models[1:] if method.replaces_model else np.diff(models, axis=0)


# Other settings than those of the other tests, all of them.
STILL_WORDS = Words(num_clients=5, num_rounds=4, clip_norm=0.8, delta=1e-5)


@cache
def still_run(method: Method) -> Run:
    """A run of four rounds that several tests look at; while it runs, it is looked at before the messages of each round leave."""
    arguments, log, logger = STILL_WORDS, Lines(), logging.getLogger("flwr")
    strategy, grid = method.strategy(arguments), grid_of(method, arguments, STILL)
    seen: list[int] = []

    def look() -> None:
        seen.append(strategy.statement.num_charged_rounds)
        for charge in method.charges:
            assert charge.ledgers(strategy)
            one = replace(method, charges=(charge,))
            assert_charged(one, strategy, arguments, len(seen) - charge.rounds_late)

    grid.watch = look
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        with chance_of(f"a still run of {method.label}"):
            run = start(strategy, grid, arguments, STILL)
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
    run.log, run.seen = "\n".join(log.texts), seen
    return run


def messages_of(grid: WatchedGrid, method: Method) -> np.ndarray:
    """What each node has sent of its clients' updates in each round [replies x d]."""
    payloads = [list(next(iter(reply.content.array_records.values())).values()) for reply in grid.received]
    rows = np.stack([payload[-1].numpy().astype(np.float64) for payload in payloads])
    return rows[:, : rows.shape[1] - method.num_extra]


def fits(samples: np.ndarray, std: float, excess: float) -> bool:
    """Whether a sample variance is that of noise of this std with this excess kurtosis, and mean zero.

    The chi-square band is exact for Gaussian noise; for other noise its degrees of freedom give the variance of the sample variance
    (Satterthwaite).
    """
    freedom = 2 * samples.size / (2 + excess)
    low, high = stats.chi2.interval(1 - FALSE_ALARM, freedom)
    return bool(low < freedom * np.mean(samples**2) / std**2 < high)


def assert_noise(rows: np.ndarray, std: float, excess: float = 0.0) -> None:
    """Noise of the right scale in every quarter of the coordinates, new in every row; and a scale 5 % off would be noticed."""
    assert fits(rows, std, excess)
    assert not fits(rows * 1.05, std, excess)
    assert not fits(rows / 1.05, std, excess)
    for quarter in np.split(rows, 4, axis=1):
        assert fits(quarter, std, excess)
    assert_unlike(rows)


def assert_unlike(rows: Sequence[np.ndarray] | np.ndarray) -> None:
    """Rows are not correlated: correlations of independent rows are Gaussian with std 1/sqrt(d)."""
    limit = stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(SIZE)
    assert np.abs(np.corrcoef(np.stack(rows)) - np.eye(len(rows))).max() < limit


# Every method has an entry


def test_every_strategy_has_an_entry():
    exported = {getattr(flower_dp.strategies, name) for name in flower_dp.strategies.__all__} - {DPStrategy}
    strategies = {value for value in exported if isinstance(value, type) and issubclass(value, DPStrategy)}
    assert strategies == {type(method.strategy(Words())) for method in METHODS}
    assert len({method.label for method in METHODS}) == len(METHODS)


# Replies


def spoilt(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], list[Message]]:
    """Change the last array of a reply; payloads have their values there."""

    def forge(reply: Message) -> list[Message]:
        record = next(iter(reply.content.array_records.values()))
        name = list(record)[-1]
        record[name] = Array(np.ascontiguousarray(change(record[name].numpy())))
        return [reply]

    return forge


def entry(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        changed = values.copy()
        changed.reshape(-1)[3] = value
        return changed

    return change


def answer_with(**arguments: Any) -> Callable[[Message], list[Message]]:
    """Change the answer that describes a payload."""

    def forge(reply: Message) -> list[Message]:
        record = next(record for record in reply.content.config_records.values() if wire.KEY in record)
        record[wire.KEY] = json.dumps(json.loads(record[wire.KEY]) | arguments)
        return [reply]

    return forge


def plain_model(reply: Message) -> list[Message]:
    """A stock client's reply."""
    reply.content = RecordDict({"arrays": model_arrays(linear())})
    return [reply]


FAULTS = {
    "NaN": spoilt(entry(math.nan)),
    "infinite": spoilt(entry(-math.inf)),
    "one value too many": spoilt(lambda values: np.append(values.ravel(), values.dtype.type(0.01))),
    "one value missing": spoilt(lambda values: values.ravel()[:-1]),
    "whole numbers": spoilt(lambda values: np.ones(values.shape, np.int32)),
    "complex numbers": spoilt(lambda values: values.astype(np.complex64)),
    "no array": lambda reply: [Message(RecordDict({"arrays": ArrayRecord()}), reply_to=reply)],
}
FOREIGN = {
    "another protocol": answer_with(protocol=wire.PROTOCOL + 1),
    "another method's encoding": answer_with(payload={"encoding": "rand-k", "length": linear()[0].weight.numel()}),
    "an unknown encoding": answer_with(payload={"encoding": "method-to-come", "length": linear()[0].weight.numel()}),
    "keys of another method": answer_with(weights=[1.0]),
}


STOCK = "a plain model, of a stock client"
ROUNDS = 3


def faults_of(method: Method) -> list[Callable[[Message], Iterable[Message]]]:
    """As many faults as a run has rounds, each fault with some methods; all of them if tests are thorough."""
    names = [*FAULTS, *(FOREIGN if method.client else [])]
    own = [] if method.stock else [STOCK]
    if not THOROUGH:
        first = ROUNDS * KINDS.index(method.label)
        names = [names[(first + number) % len(names)] for number in range(ROUNDS - len(own))]
    return [(FAULTS | FOREIGN | {STOCK: plain_model})[name] for name in names + own]


def seeded(method: Method, tamper: Any = None, num_rounds: int = ROUNDS, num_nodes: int | None = None) -> Run:
    """A run with fixed noise: what two of them do differently is not noise."""
    return run_of(method, Words(noise_seed=SEED, num_rounds=num_rounds), tamper=tamper, noise_seed=SEED, num_nodes=num_nodes)


@cache
def untampered(method: Method, *silent_nodes: int, num_rounds: int = ROUNDS) -> Run:
    """A method's run with fixed noise, in which these nodes never reply."""
    return seeded(method, silent(*silent_nodes), num_rounds)


@pytest.mark.slow
@of_each_kind
def test_a_spoilt_or_foreign_reply_counts_as_missing(method):
    """With another fault in every round the run is the same, to the last bit, as if a node's replies had never come."""
    faults = faults_of(method)
    turn = iter(faults)
    forged = seeded(method, lambda node, reply: next(turn)(reply) if node == 1 else [reply], len(faults))
    assert [report.replies for report in forged.strategy.rounds] == [3] * len(faults)
    assert forged.bits == untampered(method, 1, num_rounds=len(faults)).bits
    assert forged.bits[1] != untampered(method, num_rounds=len(faults)).bits[1]  # the honest reply would have been seen
    assert forged.strategy.statement.num_charged_rounds == len(faults)
    assert any(line.startswith(f"{len(faults)} ") and "did not count" in line for line in forged.strategy.statement.incidents)


def another(reply: Message, node: int | None = None) -> Message:
    """A second reply to the same message, with other values."""
    content = RecordDict(dict(reply.content.items()))
    record = next(iter(content.array_records.values()))
    doubled = ArrayRecord({name: Array(2 * array.numpy()) for name, array in record.items()})
    content[next(key for key, value in content.items() if value is record)] = doubled
    second = Message(content, reply_to=reply)
    second.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id if node is None else node
    second.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    assert second.metadata.src_node_id == (reply.metadata.src_node_id if node is None else node)
    return second


@pytest.mark.slow
@of_each_kind
def test_only_the_first_reply_of_a_node_that_was_asked_counts(method):
    more = seeded(method, lambda node, reply: [another(reply, node=99), reply, another(reply)])
    assert more.bits == untampered(method).bits
    assert [report.replies for report in more.strategy.rounds] == [4] * ROUNDS


# Who runs what


@of_each_kind
def test_clients_that_do_not_run_the_method_are_not_asked(method):
    arguments = Words()
    for other in {(one.name, one.client is None): one for one in METHODS}.values():
        grid = grid_of(other, arguments)
        if method.stock if other.client is None else method.name in methods_of(other):
            continue
        strategy = method.strategy(arguments)
        with pytest.raises(ValueError, match=method.name if other.client else "stock clients"):
            start(strategy, grid, arguments)
        assert not grid.train_messages
        assert strategy.statement.num_charged_rounds == 0


def methods_of(method: Method) -> list[str]:
    """The methods that an entry's clients say they run."""
    client = method.client(Words(), model=linear(), clients={"c0": SMALL.data("c0")}, noise_seed=None)
    return json.loads(client.get_properties({})[wire.KEY])["methods"]


@own_clients_of_each_kind
def test_a_client_refuses_an_instruction_of_a_foreign_method(method):
    grid = untampered(method).grid
    message, context = copy.deepcopy(grid.train_messages[0]), copy.copy(grid.contexts[1])
    (config,) = message.content.config_records.values()
    honest = json.loads(config[wire.KEY])
    foreign = [name for name in {one.name for one in METHODS} | {"method-to-come"} if name not in methods_of(method)]
    changed = [{**honest, "method": name} for name in foreign]
    without = {key: value for key, value in honest.items() if key != "ask"}
    more = {**honest, "ask": honest["ask"] | {"to-come": 1}}
    for instruction in [*changed, without, more, {**honest, "to-come": 1}, {**honest, "protocol": 2}]:
        config[wire.KEY] = json.dumps(instruction)
        context.state = RecordDict()
        with pytest.raises(
            ValueError, match=r"this client runs|missing required field ask|unknown field to-come|is not of protocol"
        ):
            answered(grid.app(message, context))
        assert not context.state  # and no account was charged


# Noise


@pytest.mark.slow
@own_noise
def test_the_noise_of_a_released_model_has_the_stated_scale(method):
    assert_noise(increments(method, still_run(method)), method.noise(STILL_WORDS, 5), method.excess(5))


@own_noise
def test_the_log_says_before_round_1_how_the_noise_compares_with_the_longest_mean(method):
    arguments, run = STILL_WORDS, still_run(method)
    heard = shares(arguments) if method.fewest > 1 else arguments.num_clients
    dimension = run.models[0].size
    norm, reach = run.strategy.rules.noise_and_signal_norms(dimension)
    assert (norm, reach) == pytest.approx(
        (method.noise(arguments, heard) * math.sqrt(dimension), method.reach(arguments)), rel=1e-3
    )
    before = run.log.partition("[ROUND 1/")[0]
    assert f"Round 1: the noise on the mean has norm {norm:.3g}, the mean itself at most {reach:.3g}" in before
    judged = f"Noise on the mean is {norm / reach:.1f} times the largest possible noiseless mean" in before
    assert judged != method.whole_run  # noise that later rounds cancel


@some_methods(lambda method: method.client is not None and method.label not in NAMESAKES)
def test_the_noise_of_a_message_has_the_stated_scale(method):
    messages = messages_of(still_run(method).grid, method)[: 5 if method.carries_noise else 8]
    std = method.message_noise(STILL_WORDS)
    if std:
        assert_noise(messages, std, method.excess(1))
    else:
        assert not messages.any()


@pytest.mark.slow
@own_clients_of_each_kind
def test_each_of_the_clients_of_a_node_adds_its_own_noise(method):
    arguments = Words(num_rounds=4)
    run = run_of(method, arguments, STILL, num_nodes=1)
    assert_noise(increments(method, run), method.noise(arguments, 4), method.excess(4))
    if std := method.message_noise(arguments):
        assert_noise(messages_of(run.grid, method), 2 * std, method.excess(4))


# Dropouts


def dropouts() -> Iterator[Any]:
    """One client of four missing; and three, where anybody tops up the noise, or somebody must answer."""
    for method in METHODS:
        if not method.variant and not method.carries_noise:
            for heard in (3, 1) if method.server_noise(Words(), 3) or method.fewest > 1 else (3,):
                yield pytest.param(method, heard, id=f"{method.label}-{heard}")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "heard"), list(dropouts()))
def test_missing_replies_leave_no_less_noise_than_the_ledger_says(method, heard):
    arguments = Words(num_rounds=8 if method.laplace else 3)  # Laplace noise needs more draws
    rounds = arguments.num_rounds
    run = run_of(method, arguments, STILL, tamper=silent(*range(heard + 1, 5)))
    assert [report.replies for report in run.strategy.rounds] == [heard] * rounds
    if heard < method.fewest:
        assert len(set(run.bits)) == 1
        assert sum("was left out" in line for line in run.strategy.statement.incidents) == rounds
    else:
        std = method.noise(arguments, heard)
        assert_noise(increments(method, run), std, method.excess(heard))
    assert_charged(method, run.strategy, arguments, rounds, messages=True)
    missing = rounds * (4 - heard)
    assert sum(line.startswith(f"{missing} ") and "did not count" in line for line in run.strategy.statement.incidents) == 1


@pytest.mark.slow
@of_each_kind
def test_a_run_in_which_every_reply_is_missing_fails_and_leaves_its_statement(method):
    arguments = Words(num_rounds=5)
    strategy = method.strategy(arguments)
    grid = grid_of(method, arguments, tamper=silent(1, 2, 3, 4))
    with pytest.raises(RuntimeError, match="no client has sent a usable update"):
        start(strategy, grid, arguments)
    rounds = len(grid.train_messages) // 4
    assert 1 <= rounds < 5
    statement = strategy.statement
    assert statement.num_charged_rounds == rounds
    assert statement.private
    assert statement.epsilon >= 0.999 * uplink_epsilon(method, arguments, rounds)
    assert sum(line.startswith(f"{4 * rounds} ") for line in statement.incidents) == 1


def uplink_epsilon(method: Method, arguments: Words, num_rounds: int) -> float:
    """The epsilon of messages alone: nothing else has left where nothing came back."""
    now = tuple(charge for charge in method.charges if not charge.rounds_late)
    return replace(method, charges=now).epsilon(arguments, num_rounds)


@some_methods(lambda method: method.poisson)
def test_an_empty_cohort_pays_and_its_noise_is_released(method):
    # The probability that any client is drawn is 1.6e-7.
    arguments = Words(num_rounds=4, sampling_rate=1e-8, delta=1e-10)
    run = run_of(method, arguments, STILL)
    assert not run.grid.train_messages
    assert [report.cohort_size for report in run.strategy.rounds] == [0] * 4
    assert run.strategy.statement.num_charged_rounds == 4
    assert 0 < run.strategy.statement.epsilon < math.inf
    if method.fewest > 1:
        assert len(set(run.bits)) == 1
    else:
        # The mean is over the expected cohort, 4e-8 clients.
        assert_noise(increments(method, run), method.noise(replace(arguments, num_clients=1), 1) / 4e-8)


# Ledgers


def plain(event: DpEvent) -> tuple[DpEvent, int]:
    """One release, and how many of its kind there are in one reply."""
    return (event.event, event.count) if isinstance(event, SelfComposedDpEvent) else (event, 1)


def assert_charged(method: Method, strategy: DPStrategy, arguments: Words, num_rounds: int, *, messages: bool = False) -> None:
    """The ledgers hold so many rounds: those of messages at least, or all."""
    for charge in method.charges:
        if charge.rounds_late and messages:
            continue
        for ledger in charge.ledgers(strategy):
            rounds = charge.count(num_rounds)
            assert ledger.num_charges == rounds
            held = [(one.event, one.count) for one in ledger.event.events]
            expected, times = plain(charge.event(arguments))
            assert [count for _, count in held] == ([rounds] if rounds else [])
            for event, _ in held:
                one, count = plain(event)
                assert (type(one), count) == (type(expected), times)
                # Numerical calibration of a multiplier stays a little on the safe side.
                assert expected.noise_multiplier * (1 - 1e-9) <= one.noise_multiplier <= expected.noise_multiplier * (1 + 2e-3)


@pytest.mark.slow
@own_noise
def test_the_ledger_is_charged_before_a_message_leaves(method):
    """The run itself looks at each charge before the messages of each round leave."""
    run = still_run(method)
    assert run.seen == [1, 2, 3, 4]
    assert_charged(method, run.strategy, STILL_WORDS, 4)


# The statement


@own_noise
def test_the_statement_says_what_the_settings_say(method):
    arguments, strategy = STILL_WORDS, still_run(method).strategy
    statement, text = strategy.statement, str(strategy.statement)
    assert statement.method == method.title
    assert f"Privacy statement: {method.title}\n" in text
    assert (statement.unit, statement.relation) == (method.unit, method.relation)
    assert statement.delta == method.delta(arguments)
    assert statement.num_charged_rounds == arguments.num_rounds
    rounds = arguments.num_rounds
    whole = f"for the whole run of {rounds} rounds, {rounds} of them charged so far"
    assert (whole if method.whole_run else f"for {rounds} charged round") in text
    assert method.sampling(arguments) in statement.sampling
    for name, value in method.numbers(arguments).items():
        assert statement.noise[name] == pytest.approx(value, rel=2e-3), name
    assert statement.noise["clip_norm"] == arguments.clip_norm
    # Never less than the exact value; numerical accountants give a little more.
    exact = method.epsilon(arguments, arguments.num_rounds)
    assert exact * (1 - 1e-3) <= statement.epsilon <= exact * 1.01
    assert statement.epsilon == pytest.approx(max(one.epsilon for one in statement.adversaries if not one.trusted))
    against = {one.name: one for one in statement.adversaries}
    assert against["the server"].lowest_noise_std == pytest.approx(method.message_noise(arguments), rel=2e-3)
    rows = [line.strip().split("  ")[0] for line in text.splitlines()]
    assert all(f"{one.name}{' (TRUSTED)' * one.trusted}" in rows for one in statement.adversaries)
    assert f"NOT COVERED    - {OTHER_RUNS}" in text
    assert statement.private
    assert not statement.incidents


def with_answer(reply: Message, **arguments: Any) -> Message:
    """The same reply with other words in its answer."""
    copied = copy.deepcopy(reply)
    for record in copied.content.config_records.values():
        if wire.KEY in record:
            record[wire.KEY] = json.dumps(json.loads(str(record[wire.KEY])) | arguments)
    return copied


@of_each_kind
def test_noise_from_a_seed_is_not_private(method):
    strategy = untampered(method).strategy
    statement = strategy.statement
    assert statement.epsilon == strategy.epsilon == math.inf
    assert not statement.private
    assert "NOT PRIVATE" in str(statement)
    assert statement.paper_epsilon is None or not statement.paper_epsilon.valid


@own_clients_of_each_kind
def test_a_client_with_noise_from_a_seed_is_refused_and_changes_no_other_statement(method):
    """As if it had not replied: a client that lies can't make the run of the others count as not private."""
    arguments = Words(num_rounds=1)

    def seeded_one(node, reply):
        return [with_answer(reply, seeded_noise=True) if node == 1 else reply]

    refused = run_of(method, arguments, tamper=seeded_one).strategy
    missing = run_of(method, arguments, tamper=silent(1)).strategy
    assert refused.statement.private == missing.statement.private
    assert refused.statement.private
    assert refused.statement.epsilon == missing.statement.epsilon
    assert refused.epsilon == missing.epsilon < math.inf
    assert (refused.missing.rejected, refused.rounds[0].replies) == (1, missing.rounds[0].replies)
    assert any("fixed seed" in line for line in refused.statement.incidents) != refused.cohort_is_secret
    # Clients whose noise is from a seed say so.
    with pytest.raises(RuntimeError, match="its noise is from a fixed seed"):
        run_of(method, arguments, noise_seed=SEED)


# Hosting


@pytest.mark.slow
@each_with([2, 1], "num_nodes", condition=lambda method: method.client is not None)
def test_one_client_a_node_or_many_makes_no_difference(method, num_nodes):
    apart, together = untampered(method), seeded(method, num_nodes=num_nodes)
    assert len(set(apart.bits)) == ROUNDS + 1
    if method.exact:
        assert together.bits == apart.bits
    else:  # sums of weighted rows are rounded to float32, once a node
        for model, other in zip(apart.models, together.models, strict=True):
            np.testing.assert_allclose(model, other, rtol=1e-5, atol=1e-5 * np.abs(model).max())
    assert [report.replies for report in together.strategy.rounds] == [4] * ROUNDS


# Again


@pytest.mark.slow
@fresh_rounds
def test_a_second_run_starts_with_an_empty_ledger_and_fresh_noise(method):
    arguments = Words(num_rounds=2)
    strategy = method.strategy(arguments)
    first = start(strategy, grid_of(method, arguments, STILL, tamper=silent(1)), arguments, STILL)
    assert strategy.statement.incidents
    before = strategy.statement
    grid = grid_of(method, arguments, STILL)
    charged = []
    grid.watch = lambda: charged.append([ledger.num_charges for ledger in method.charges[0].ledgers(strategy)])
    second = start(strategy, grid, arguments, STILL)
    assert [set(counts) for counts in charged] == [{1}, {1 if method.whole_run else 2}]
    assert_charged(method, strategy, arguments, 2)
    assert strategy.statement.num_charged_rounds == len(strategy.rounds) == 2
    assert not strategy.statement.incidents
    assert strategy.statement.epsilon == pytest.approx(before.epsilon)
    assert_unlike(np.concatenate([increments(method, first), increments(method, second)]))


def copies(of: Any, how: str, count: int) -> list[Any]:
    if how == "pickle":
        text = cloudpickle.dumps(of)
        return [pickle.loads(text) for _ in range(count)]  # noqa: S301
    return [copy.deepcopy(of) for _ in range(count)]


@pytest.mark.slow
@each_with(["pickle", "deepcopy"], "how", condition=lambda method: method.server_noise(Words(), 3) > 0)
def test_copies_of_a_strategy_repeat_no_noise(method, how):
    """All that differs between two runs is what the server draws: the clients' noise is fixed, and one is missing."""

    def unsaid(node, reply):
        """Clients do not say that their noise is fixed: the server would refuse it."""
        return [] if node == 1 else [with_answer(reply, seeded_noise=False) if method.client else reply]

    arguments = Words(num_rounds=1)
    strategy = method.strategy(arguments)
    start(strategy, grid_of(method, arguments, STILL), arguments, STILL)
    released = []
    for one in copies(strategy, how, 4):
        grid = grid_of(method, arguments, STILL, tamper=unsaid, noise_seed=SEED)
        run = start(one, grid, arguments, STILL)
        released.append(increments(method, run)[0])
    # What the clients have sent is in all four, and in none of these.
    contrasts = np.array([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
    assert_noise(contrasts @ np.stack(released), method.server_noise(arguments, 3))


@pytest.mark.slow
@each_with(
    ["pickle", "deepcopy"], "how", condition=lambda method: method.client is not None and method.message_noise(Words()) > 0
)
def test_copies_of_a_client_repeat_no_noise(method, how):
    grid = still_run(method).grid
    message, context = grid.train_messages[0], copy.copy(grid.contexts[1])
    client = method.client(STILL_WORDS, model=still_model(), clients={"c0": still_data("c0")}, noise_seed=None)

    def payload(one: Any) -> np.ndarray:
        context.state = RecordDict()
        reply = client_app(lambda _: one)(message, context)
        return np.asarray(list(next(iter(reply.content.array_records.values())).values())[-1].numpy(), np.float64)

    first = payload(client)  # before it is copied: what it keeps from one reply to the next would be copied with it
    assert_unlike([first, payload(client), *map(payload, copies(client, how, 2))])


# Budgets


def limited(method: Method, num_rounds: int) -> tuple[Words, float]:
    """Settings that pay for so many rounds out of 4, and the epsilon that they allow."""
    arguments = Words(num_rounds=4)
    if not method.target:
        arguments = replace(arguments, num_replies=num_rounds)
        return arguments, method.epsilon(arguments, num_rounds) * 1.01
    target = method.epsilon(arguments, num_rounds) * 1.01
    return replace(arguments, target_epsilon=target), target


@pytest.mark.slow
@each_with([1, 3], "num_rounds", condition=lambda method: not method.whole_run)
def test_the_target_is_never_passed(method, num_rounds):
    arguments, target = limited(method, num_rounds)
    run = run_of(method, arguments)
    assert run.strategy.statement.num_charged_rounds == len(run.strategy.rounds) == num_rounds
    assert len(run.grid.train_messages) == 4 * num_rounds
    assert run.strategy.statement.epsilon <= target
    assert len(set(run.bits)) == num_rounds + 1
    ended = [line for line in run.strategy.statement.incidents if line.startswith(f"ended before round {num_rounds + 1}: ")]
    assert len(ended) == 1


@some_methods(lambda method: method.target)
def test_a_first_round_that_cannot_be_paid_for_is_not_run(method):
    arguments = Words(target_epsilon=0.5 * method.epsilon(Words(), 1))
    grid, strategy = grid_of(method, arguments), method.strategy(arguments)
    with pytest.raises(ValueError, match=r"no round was run: ended before round 1: it would pass target_epsilon="):
        start(strategy, grid, arguments)
    assert not grid.train_messages
    assert not strategy.rounds
    statement = strategy.statement
    assert (statement.num_charged_rounds, statement.epsilon) == (0, 0.0)
    assert [line for line in statement.incidents if line.startswith("ended before round 1: ")]


@some_methods(lambda method: not method.target and not method.whole_run)
def test_a_client_whose_account_is_spent_sends_nothing(method):
    """The server has forgotten the run that spent it; the clients' own accounts have not."""
    arguments = Words(num_rounds=2)
    grid = grid_of(method, arguments)
    start(method.strategy(arguments), grid, arguments)
    del grid.received[:]
    strategy = method.strategy(arguments)
    with pytest.raises(RuntimeError, match="budget is spent"):
        start(strategy, grid, arguments)
    assert grid.received
    for reply in grid.received:
        values = list(next(iter(reply.content.array_records.values())).values())[-1].numpy()
        assert not values.any()
    assert [report.replies for report in strategy.rounds] == [0, 0]


# Private evaluations; tests/strategies/test_generated_statements.py has all samplers and placements


class JoinedGrid(LocalGrid):
    """Two more nodes join after the second round of training."""

    late = 2

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        self.late -= any(asks_to_train(message) for message in messages)
        if not self.late:
            for node in (5, 6):
                config = {"partition-id": node - 1}
                self.contexts[node] = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        return replies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "evaluation", "every"),
    [("full", "full", 2), ("full", "in turn", 1), ("in turn", "full", 3), ("in turn", "in turn", 1)],
)
def test_nobody_trains_and_evaluates_more_than_the_ledger_was_charged(training, evaluation, every):
    """Counted are the messages to each node; two more join where the charges allow it."""
    words = {"clip_norm": 0.5, "noise_multiplier": 4.0, "num_clients": 4, "delta": 1e-3}
    plan = PrivateEvaluation(noise_multiplier=2.0, sampling=SAMPLERS[evaluation], metrics={"accuracy": 1.0}, every=every)
    strategy, grid = DPFedAvg(**words, sampling=SAMPLERS[training], evaluation=plan), JoinedGrid(evaluating_stock_app(), 4)
    strategy._session.log = kept = Kept()
    strategy.start(grid, model_arrays(linear()), num_rounds=6)
    assert_charges_are_the_ledgers(strategy, kept)
    asked = Counter((one.metadata.message_type, one.metadata.dst_node_id) for one in grid.sent)
    nodes = {node for kind, node in asked if kind in ("train", "evaluate")}
    assert (max(nodes) > 4) == (training == evaluation == "full")
    evaluations = [asked["evaluate", node] for node in range(1, 5)]
    if evaluation == "full":
        assert set(evaluations) == {6 // every}
    else:
        assert sum(evaluations) == 6 // every
        assert max(evaluations) - min(evaluations) <= 1
    statement = strategy.statement
    assert statement.private
    spent = {(asked["train", node], asked["evaluate", node]) for node in nodes}
    costs = [gaussian_epsilon([4.0] * trained + [2.0] * evaluated, statement.relation, 1e-3) for trained, evaluated in spent]
    assert max(costs) <= statement.epsilon * (1 + 1e-6) <= strategy.epsilon * (1 + 2e-6)
    assert max(statement.epsilon_by_release.values()) <= statement.epsilon * (1 + 1e-6)


def test_the_closed_forms_are_those_of_the_literature():
    """Balle and Wang 2018: sigma 1 at epsilon 1 has delta 0.126936 (Dong et al. give the same as a Gaussian trade-off)."""
    assert gaussian_delta(1.0, 1.0) == pytest.approx(0.126936, abs=1e-6)
