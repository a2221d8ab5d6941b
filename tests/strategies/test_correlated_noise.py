"""DP-FTRL on the real way: the covariance of what is released, who is asked, one event, a secret state that goes on."""

import copy
import json
import logging
import math
import pickle
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NoOpDpEvent
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvgM
from scipy import stats

from flower_dp import wire
from flower_dp.clients import client_app
from flower_dp.core.noise import noise_generator
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FullSampling, PoissonSampling
from flower_dp.core.serialization import dump_bytes, load_bytes
from flower_dp.core.strategy_matrix import ParticipationSchema
from flower_dp.planning.correlated_noise import BISR, BLT, Banded, Tree
from flower_dp.privacy import accounting
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store
from flower_dp.strategies import DPFTRL, AdaptiveClip, DPFedAvg, DPFedSAM, FedSMP, PrivateEvaluation, session, writer
from flower_dp.strategies.checkpoint import NOISE, CheckpointFolder
from flower_dp.strategies.releases.correlated_noise import CorrelatedSharing
from flower_dp.strategies.releases.participation_state import _Draws
from flower_dp.strategies.writer import LEDGER
from tests.contract_runs import STILL, still_data, still_model
from tests.contracts import dp_client
from tests.grids import LocalGrid, asks_to_train
from tests.stock import arrays, shifted, stock_app

FALSE_ALARM = 1e-6
CLIP, Z, ROUNDS, CLIENTS, COHORT, SEPARATION = 0.8, 1.5, 8, 6, 2, 3
SAMPLING = MinimumSeparationSampling(cohort_size=COHORT, min_separation=SEPARATION)
SCHEMA = ParticipationSchema(num_rounds=ROUNDS, min_separation=SEPARATION, max_participations=3)
WORDS = {"clip_norm": CLIP, "noise_multiplier": Z, "num_clients": CLIENTS, "delta": 1e-5, "sampling": SAMPLING}
MODEL = arrays(weight=np.zeros((2, 3000), np.float32))
KINDS = [BLT(), BLT(num_buffers=1), BISR(), Banded(bands=3), Tree()]


def strategy_of(noise=None, cls=DPFTRL, **words):
    return cls(**WORDS | {"num_rounds": ROUNDS, "noise": BLT() if noise is None else noise} | words)


class Grid(LocalGrid):
    """Hosts of one client each, whose updates are zero; nodes come and go, and some rounds have no reply."""

    def __init__(self, num_nodes=CLIENTS, names=None, silent=(), model=still_model):
        self.names = names or {node: f"c{node}" for node in range(1, num_nodes + 1)}

        def client_fn(context):
            name = self.names[context.node_id]
            return dp_client(None, model=model(), clients={name: still_data(name)})

        super().__init__(client_app(client_fn), num_nodes, tamper=self._silent)
        self.silent, self.offline, self.asked = set(silent), set(), []
        self.before = lambda server_round: None

    def _silent(self, node, reply):
        return [] if int(reply.metadata.group_id) in self.silent else [reply]

    def join(self, node, name):
        self.names[node] = name
        config = {"partition-id": node - 1}
        self.contexts[node] = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def get_node_ids(self):
        return [node for node in self.contexts if node not in self.offline]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            if asks_to_train(message):
                self.asked.append((int(message.metadata.group_id), self.names[message.metadata.dst_node_id]))
        for server_round in {int(message.metadata.group_id) for message in messages if asks_to_train(message)}:
            self.before(server_round)
        return super().send_and_receive(messages, timeout=timeout)


def start(strategy, grid, folder=None, *, resume=False, num_rounds=ROUNDS, models=None):
    def keep(server_round, record):
        if models is not None:
            models[server_round] = np.concatenate([part.numpy().ravel() for part in record.values()]).astype(np.float64)

    model = arrays(**{name: value.numpy() for name, value in STILL.model().state_dict().items()})
    return strategy.start(grid, model, num_rounds, checkpoint_dir=folder, resume=resume, evaluate_fn=keep)


def released(models, cohort=COHORT):
    """The noise of each round's sum [rounds x d]."""
    return np.diff(np.stack([models[number] for number in sorted(models)]), axis=0) * cohort


def rows_of(matrix, num_rounds):
    """C^-1, or what a tree makes of its draws: every draw is a unit vector."""
    draws, made, buffers = iter(np.eye(2 * num_rounds)), [], ()
    for number in range(1, num_rounds + 1):
        row, buffers = matrix.row(number, buffers, lambda: next(draws).copy())
        made.append(row)
    return np.array(made)


def fits(samples, std):
    low, high = stats.chi2.interval(1 - FALSE_ALARM, samples.size)
    return bool(low < np.sum(samples**2) / std**2 < high)


def whitened(rows, matrix):
    """Rows whose covariance is the identity if that of `rows` is R R^T."""
    made = rows_of(matrix, len(rows))
    return np.linalg.solve(np.linalg.cholesky(made @ made.T), rows)


def is_correlated_as(rows, matrix, std):
    """Whether rows have the covariance std^2 R R^T."""
    white = whitened(rows, matrix)
    off = np.abs(np.corrcoef(white) - np.eye(len(white))).max()
    return (
        fits(white, std)
        and all(fits(row, std) for row in white)
        and off < stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(rows.shape[1])
    )


# What is released


@pytest.mark.parametrize(
    ("make", "noise"),
    [
        *((strategy_of, kind) for kind in KINDS),
        (lambda noise: strategy_of(noise, DPFedAvg), BLT()),
        (lambda noise: strategy_of(noise, DPFedSAM, placement="central"), BISR()),
    ],
    ids=lambda value: repr(value) if not callable(value) else "",
)
def test_the_covariance_of_the_released_sequence_is_that_of_the_strategy_matrix(make, noise):
    """Five percent more or less is noticed, and so is independent noise of the same variances."""
    strategy, models = make(noise), {}
    start(strategy, Grid(), models=models)
    matrix, rows, std = strategy.rules.noise.matrix, released(models), Z * CLIP
    assert is_correlated_as(rows, matrix, std)
    assert not is_correlated_as(1.05 * rows, matrix, std)
    assert not is_correlated_as(rows / 1.05, matrix, std)
    made = rows_of(matrix, ROUNDS)
    independent = np.random.default_rng(5).standard_normal(rows.shape) * std * np.sqrt(np.sum(made**2, axis=1))[:, None]
    assert not is_correlated_as(independent, matrix, std)
    error = np.sqrt(np.mean(np.cumsum(rows, axis=0) ** 2))
    assert error == pytest.approx(std * matrix.prefix_error(ROUNDS), rel=0.03)
    assert strategy.statement.noise["noise_std_of_prefix_sums"] == pytest.approx(std * matrix.prefix_error(ROUNDS))


def test_independent_noise_under_a_minimum_separation_is_independent_and_costs_each_participation():
    strategy, models = DPFedAvg(**WORDS), {}
    start(strategy, Grid(), models=models)
    rows = released(models)
    assert fits(rows, Z * CLIP)
    limit = stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(rows.shape[1])
    assert np.abs(np.corrcoef(rows) - np.eye(ROUNDS)).max() < limit
    by_hand = accounting.epsilon(GaussianDpEvent(Z / math.sqrt(3)), delta=1e-5, relation="add-or-remove-one")
    assert strategy.statement.epsilon == pytest.approx(by_hand.epsilon)


def test_missing_replies_change_no_noise():
    strategy, models = strategy_of(), {}
    start(strategy, Grid(silent=(2, 3, 7)), models=models)
    assert is_correlated_as(released(models), strategy.rules.noise.matrix, Z * CLIP)


def test_an_adaptive_clip_norm_scales_the_noise_of_its_round():
    clip = AdaptiveClip(initial_clip_norm=CLIP, min_clip_norm=CLIP / 2, max_clip_norm=CLIP * 2)
    strategy, models, norms = strategy_of(clip_norm=clip), {}, []
    grid = Grid()
    grid.before = lambda _: norms.append(strategy._session.pending["dp-ftrl"].now.ask.promise.clip_norm)
    start(strategy, grid, models=models)
    assert len(set(norms)) > 2  # it stays at its limits
    assert is_correlated_as(released(models) / np.array(norms)[:, None], strategy.rules.noise.matrix, Z)


def test_momentum_and_cooldown_move_the_model_by_what_was_released():
    plain, moved, models, others = (
        strategy_of(noise_seed=3),
        strategy_of(noise_seed=3, server_momentum=0.5, server_learning_rate=0.1, cooldown=0.5),
        {},
        {},
    )
    start(plain, Grid(), models=models)
    start(moved, Grid(), models=others)
    steps, velocity, model = np.diff(np.stack(list(models.values())), axis=0), 0.0, models[0]
    rates = [0.1 * rate for rate in (1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2)]
    for number, (step, rate) in enumerate(zip(steps, rates, strict=True), start=1):
        velocity = 0.5 * velocity + step
        model = model + rate * velocity
        np.testing.assert_allclose(others[number], model, atol=1e-5)


# What it costs


@pytest.mark.parametrize("relation", ["add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("noise", KINDS, ids=repr)
def test_one_event_of_the_whole_run_is_charged_before_its_first_message(noise, relation):
    strategy, grid, seen = strategy_of(noise, relation=relation), Grid(), []
    event = GaussianDpEvent(Z / strategy.rules.noise.matrix.sensitivity(SCHEMA))
    whole = accounting.epsilon(event, delta=1e-5, relation=relation).epsilon
    grid.before = lambda _: seen.append(strategy.statement.epsilon)
    start(strategy, grid)
    assert seen == pytest.approx([whole] * ROUNDS)
    assert strategy.charges.numbers() == {"dp-ftrl": ROUNDS}
    history = strategy.rules.ledger(strategy.charges)
    assert [(one, count) for one, count in history.counts.items() if not isinstance(one, NoOpDpEvent)] == [(event, 1)]
    assert strategy.rules.outside_ledger(strategy.charges).cost(1e-5).epsilon == pytest.approx(whole)
    assert "One release covers all 8 rounds. It was charged before the first one" in " ".join(str(strategy.statement).split())
    assert strategy.statement.paper_epsilon is None
    assert strategy.epsilon >= whole * (1 - 1e-9)


def test_a_run_that_ends_early_costs_as_much(tmp_path):
    strategy = strategy_of(num_clients=CLIENTS)
    start_killed(strategy, tmp_path / "run", server_round=3)
    assert "for the whole run of 8 rounds, 3 of them charged so far." in str(strategy.statement)
    whole = accounting.epsilon(
        GaussianDpEvent(Z / strategy.rules.noise.matrix.sensitivity(SCHEMA)), delta=1e-5, relation="add-or-remove-one"
    )
    assert strategy.statement.epsilon == pytest.approx(whole.epsilon)


def test_epsilon_calibrates_the_noise_of_the_whole_run():
    strategy = strategy_of(noise_multiplier=None, epsilon=2.0)
    start(strategy, Grid())
    assert 1.99 < strategy.statement.epsilon <= 2.0
    tighter = strategy_of(noise_multiplier=strategy.rules.release.mechanism.noise_multiplier * 0.99)
    start(tighter, Grid())
    assert tighter.statement.epsilon > 2.0


def test_private_evaluations_have_independent_noise_and_pay_for_each():
    plan = PrivateEvaluation(noise_multiplier=2.0, sampling=FullSampling(), every=2)
    strategy = strategy_of(evaluation=plan)
    start(strategy, Grid())
    evaluation = strategy.rules.evaluation
    assert not isinstance(evaluation.noise, CorrelatedSharing)
    assert dict(evaluation.history(strategy.charges).counts) == {GaussianDpEvent(2.0): 4}
    parts = [GaussianDpEvent(Z / strategy.rules.noise.matrix.sensitivity(SCHEMA)), *[GaussianDpEvent(2.0)] * 4]
    both = GaussianDpEvent(sum(part.noise_multiplier**-2 for part in parts) ** -0.5)
    assert strategy.statement.epsilon == pytest.approx(accounting.epsilon(both, delta=1e-5, relation="add-or-remove-one").epsilon)
    calibrated = strategy_of(noise_multiplier=None, epsilon=8.0, evaluation=plan)
    start(calibrated, Grid())
    assert 7.9 < calibrated.statement.epsilon <= 8.0


def test_without_noise_a_run_is_not_private():
    strategy = strategy_of(noise_multiplier=0.0)
    start(strategy, Grid())
    assert not strategy.statement.private


# Who is asked


def gaps(asked):
    last, found = {}, []
    for server_round, name in asked:
        found += [server_round - last[name]] if name in last else []
        last[name] = server_round
    return found


def test_nobody_is_asked_too_early_or_too_often_whoever_is_connected():
    rng = np.random.default_rng(1)
    sampling = MinimumSeparationSampling(cohort_size=2, min_separation=4, max_participations=9)
    strategy = strategy_of(num_rounds=40, sampling=sampling, num_clients=8)
    grid = Grid(num_nodes=8)

    def come_and_go(server_round):
        grid.offline = set(rng.choice(8, 4, replace=False) + 1) if server_round > 1 else set()
        if server_round == 20:
            grid.join(9, "c9")
            grid.join(10, "c10")

    grid.before = come_and_go
    start(strategy, grid, num_rounds=40)
    assert min(gaps(grid.asked)) == 4
    counts = Counter(name for _, name in grid.asked)
    assert set(counts) == {f"c{node}" for node in range(1, 11)}
    assert max(counts.values()) <= 9
    assert max(Counter(server_round for server_round, _ in grid.asked).values()) == 2
    assert strategy.charges.number("dp-ftrl") == 40


def test_clients_that_are_spent_are_not_asked_again_and_the_log_says_so(caplog):
    sampling = MinimumSeparationSampling(cohort_size=2, min_separation=1, max_participations=2)
    strategy, grid = strategy_of(sampling=sampling), Grid()
    start(strategy, grid)
    assert Counter(server_round for server_round, _ in grid.asked) == dict.fromkeys(range(1, 7), 2)
    assert set(Counter(name for _, name in grid.asked).values()) == {2}
    assert "Only 0 of cohort_size=2 clients are connected and may take part again in round 7" in caplog.text


def test_a_cohort_is_full_of_connected_clients():
    strategy, grid = strategy_of(num_clients=9, num_rounds=3, sampling=SAMPLING), Grid(num_nodes=9)
    grid.before = lambda server_round: setattr(grid, "offline", {1, 2, 3})
    start(strategy, grid, num_rounds=3)
    assert Counter(server_round for server_round, _ in grid.asked) == {1: 2, 2: 2, 3: 2}
    assert not {name for server_round, name in grid.asked if server_round > 1} & {"c1", "c2", "c3"}


def test_a_client_that_returns_on_another_node_is_the_same_and_two_with_one_name_are_one():
    strategy, grid = strategy_of(num_clients=CLIENTS), Grid()

    def swap(server_round):
        for node in range(1, CLIENTS + 1):  # all come back under other ids; c1 has two nodes
            grid.contexts.pop(node + 10 * (server_round - 1), None)
            grid.join(node + 10 * server_round, f"c{node}")
        grid.join(1000 + server_round, "c1")

    grid.before = swap
    start(strategy, grid)
    assert min(gaps(grid.asked)) >= SEPARATION
    assert max(Counter(grid.asked).values()) == 1


def test_clients_named_by_their_nodes_are_refused_in_a_deployment_and_taken_in_a_simulation():
    grid = LocalGrid(stock_app(shifted(lambda node: 0.0)), CLIENTS)
    with pytest.raises(ValueError, match=r"'node-1' is named by its node's id.*give every client its own name"):
        start(strategy_of(), grid)
    assert not any(map(asks_to_train, grid.sent))
    grid.simulated = True
    start(strategy_of(), grid)


def test_a_newcomer_named_by_its_node_is_not_asked():
    strategy, grid = strategy_of(), Grid()
    grid.before = lambda server_round: server_round == 2 and grid.join(7, "node-7")
    start(strategy, grid)
    assert "node-7" not in {name for _, name in grid.asked}


def test_a_device_refuses_a_request_that_comes_too_early_although_the_server_has_forgotten():
    """The server's state is that of another run; the device's account is of this one."""
    strategy, grid = strategy_of(num_rounds=3), Grid()
    start(strategy, grid, num_rounds=3)
    asked = [message for message in grid.sent if asks_to_train(message)]
    before = len(grid.received)
    replies = list(grid.send_and_receive(copy.deepcopy(asked[:1])))
    assert len(grid.received) == before + 1
    text = str(replies[0].content)
    assert "was counted before, or comes before one that was" in text
    assert not any(array.numpy().any() for record in replies[0].content.array_records.values() for array in record.values())


# The secret state


def secret_of(folder):
    return load_bytes((folder / NOISE).read_bytes())


@pytest.fixture
def every_round(monkeypatch):
    monkeypatch.setattr(writer, "_SHARE", 1.0)


@pytest.mark.usefixtures("every_round")
def test_the_state_is_on_the_disk_before_messages_leave_and_tells_nobody_else(tmp_path, caplog):
    strategy, grid, folder, seen = strategy_of(), Grid(), tmp_path / "run", []

    def look(server_round):
        found = secret_of(folder)
        state = found.secret["dp-ftrl"]
        assert (found.charged, len(state.seeds)) == ({"dp-ftrl": server_round}, server_round)
        assert {name for name, past in state.past.items() if past.last == server_round} == {
            name for number, name in grid.asked if number == server_round
        }
        assert (folder / NOISE).stat().st_mode & 0o77 == 0
        seen.append(state.seeds)

    grid.before = look
    with caplog.at_level(logging.DEBUG):
        result = start(strategy, grid, folder)
    assert [len(seeds) for seeds in seen] == list(range(1, ROUNDS + 1))
    assert all(seeds == seen[-1][: len(seeds)] for seeds in seen)
    assert {len(bytes.fromhex(seed)) for seed in set(seen[-1])} == {32}
    for text in (
        caplog.text,
        str(strategy.statement),
        repr(strategy.state.secret),
        repr(strategy.rules.noise),
        repr(result),
        repr(strategy.rounds),
    ):
        assert not any(seed in text for seed in seen[-1])
    assert (folder / NOISE).stat().st_size < 10_000  # no buffers
    others = [path for path in folder.iterdir() if path.stat().st_mode & 0o77]
    assert not [path for path in others if seen[-1][0].encode() in path.read_bytes()]


def test_a_state_that_cannot_be_written_sends_no_message(tmp_path, monkeypatch):
    def full(self, noise):
        raise OSError("the disk is full")

    monkeypatch.setattr(CheckpointFolder, "write_noise", full)
    strategy, grid = strategy_of(), Grid()
    with pytest.raises(OSError, match="full"):
        start(strategy, grid, tmp_path / "run")
    assert grid.asked == []


class Killed(BaseException):
    """The server's process has ended."""


def start_killed(strategy, folder, *, server_round):
    """Start a run whose server's process ends in a round, before its messages leave."""

    def stop(number):
        if number == server_round:
            raise Killed

    grid = Grid()
    grid.before = stop
    with pytest.raises(Killed):
        start(strategy, grid, folder)


POINTS = ("charged", "noise written", "messages sent", "learnt")


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("noise", [BLT(), Banded(bands=3), Tree()], ids=repr)
@pytest.mark.parametrize("in_round", [1, 4])
@pytest.mark.parametrize("at", POINTS)
def test_a_resumed_run_continues_the_same_noise_and_keeps_the_separation(at, in_round, noise, tmp_path, monkeypatch):
    folder, copied, models, first = tmp_path / "run", tmp_path / "copied", {}, Grid()

    def die(server_round):
        if server_round == in_round:
            shutil.copytree(folder, copied)
            raise Killed

    def after(owner, name, number):
        call = getattr(owner, name)

        def dying(self, *arguments, **named):
            value = call(self, *arguments, **named)
            die(number(arguments))
            return value

        return owner, name, dying

    with monkeypatch.context() as patch:
        if at == "charged":
            patch.setattr(*after(Store, "append", lambda arguments: arguments[1].server_round))
        elif at == "noise written":
            patch.setattr(*after(writer.Writer, "noise", lambda arguments: arguments[1]["dp-ftrl"]))
        elif at == "messages sent":
            first.before = die
        else:
            patch.setattr(*after(session.Session, "next_model", lambda arguments: arguments[0]))
        with pytest.raises(Killed):
            start(strategy_of(noise), first, folder, models=models)
    again, second, later = strategy_of(noise), Grid(), {}
    start(again, second, copied, resume=True, models=later)
    asked = first.asked + second.asked
    assert min(gaps(asked)) >= SEPARATION
    assert {number for number, _ in first.asked}.isdisjoint({number for number, _ in second.asked})
    with Store(copied / LEDGER, read_only=True) as ledger:
        assert ledger.num_charges == again.charges.number("dp-ftrl") == ROUNDS
    # What each round has released is its own row of one C^-1 Z.
    state, rows = again.state.secret["dp-ftrl"], {}
    buffers = ()
    for number, seed in enumerate(state.seeds, start=1):
        draw = _Draws(noise_generator(int(seed, 16), "correlated", number), models[0].size)
        rows[number], buffers = again.rules.noise.matrix.row(number, buffers, draw)
    assert len(rows) == ROUNDS
    compared = 0
    for one in (models, later):
        for number in one:
            if number - 1 in one and not np.array_equal(one[number], one[number - 1]):
                np.testing.assert_allclose(
                    (one[number] - one[number - 1]) * COHORT, Z * CLIP * rows[number], atol=2e-2 * Z * CLIP
                )
                compared += 1
    assert compared >= ROUNDS - 2


def test_a_machine_that_draws_other_numbers_cannot_resume(tmp_path):
    folder = tmp_path / "run"
    start_killed(strategy_of(), folder, server_round=4)
    found = secret_of(folder)
    state = found.secret["dp-ftrl"]
    changed = replace(state, checksum=state.checksum + 1)
    content = dump_bytes(type(found)(run=found.run, charged=found.charged, secret={"dp-ftrl": changed}))
    (folder / NOISE).write_bytes(content)
    other = Grid()
    with pytest.raises(RuntimeError, match="draws other numbers than the run did; resume it with the version"):
        start(strategy_of(), other, folder, resume=True)
    assert not other.asked


def test_a_state_with_noise_is_not_taken_over_from_elsewhere():
    strategy, grid = strategy_of(), Grid()
    model = MODEL
    strategy.configure_train(1, model, {}, grid)
    strategy.aggregate_train(1, [])
    older = load_bytes(dump_bytes(strategy.state))
    with pytest.raises(LedgerError, match="a copy elsewhere may have continued the run"):
        strategy_of().state = older
    strategy.configure_train(2, model, {}, grid)
    strategy.aggregate_train(2, [])
    with pytest.raises(LedgerError, match="the state has 1 x dp-ftrl"):
        strategy.state = older


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_releases_no_noise_a_second_time(how):
    strategy, grid = strategy_of(), Grid()
    made = copy.deepcopy if how == "deepcopy" else lambda one: pickle.loads(pickle.dumps(one))  # noqa: S301
    model = MODEL
    strategy.configure_train(1, model, {}, grid)
    strategy.aggregate_train(1, [])
    strategy._session._manager = None  # knows the grid, which has functions
    between = made(strategy)
    strategy.configure_train(2, model, {}, grid)
    strategy.aggregate_train(2, [])
    assert between.configure_train(2, model, {}, grid) == []
    assert any("it must be round 3" in line for line in between.statement.incidents)
    first, second = (one.state.secret["dp-ftrl"] for one in (strategy, between))
    assert (len(first.seeds), len(second.seeds)) == (2, 1)


def test_every_run_of_a_strategy_has_its_own_noise():
    strategy, grid, seeds = strategy_of(), Grid(), set()
    for _ in range(2):
        start(strategy, grid)
        seeds.add(strategy.state.secret["dp-ftrl"].seeds)
    assert len(seeds) == 2
    assert max(past.count for past in strategy.state.secret["dp-ftrl"].past.values()) <= 3


# What is refused


def test_a_round_beyond_those_of_the_noise_is_not_run():
    strategy, grid = strategy_of(num_rounds=2), Grid()
    model = MODEL
    for number in (1, 2):
        assert strategy.configure_train(number, model, {}, grid)
        strategy.aggregate_train(number, [])
    assert strategy.configure_train(3, model, {}, grid) == []
    assert "ended before round 3: its noise was made for num_rounds=2" in strategy.statement.incidents
    assert strategy.charges.number("dp-ftrl") == 2
    noise = strategy.rules.noise
    with pytest.raises(ValueError, match="round 3: can't be run: its noise was made for num_rounds=2"):
        noise.begin(strategy.state.secret["dp-ftrl"], 3, 6000, np.random.default_rng())


def test_a_round_out_of_order_is_not_run():
    strategy, grid = strategy_of(), Grid()
    with pytest.raises(ValueError, match="it must be round 1"):
        strategy.configure_train(5, MODEL, {}, grid)


@pytest.mark.parametrize("num_rounds", [ROUNDS - 1, ROUNDS + 1])
def test_a_run_has_the_rounds_that_its_noise_was_made_for(num_rounds):
    grid = Grid()
    with pytest.raises(ValueError, match=f"num_rounds={num_rounds}: the strategy was constructed with num_rounds={ROUNDS}"):
        start(strategy_of(), grid, num_rounds=num_rounds)
    assert not grid.asked


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strategy_of(sampling=PoissonSampling(sampling_rate=0.1)), "correlated noise needs a MinimumSeparationSampling"),
        (lambda: strategy_of(cls=DPFedAvg, sampling=FullSampling()), "correlated noise needs a MinimumSeparationSampling"),
        (lambda: strategy_of(cls=DPFedAvg, placement="distributed"), "needs placement='central'"),
        (lambda: strategy_of(cls=DPFedSAM, placement="central", keep_ratio=0.5), "needs placement='central' and whole updates"),
        (lambda: strategy_of(noise="blt"), "a kind of correlated noise, such as BLT"),
        (lambda: strategy_of(noise=BLT), "a kind of correlated noise, such as BLT"),
        (lambda: strategy_of(cls=DPFedAvg, num_rounds=None), "num_rounds: is missing"),
        (lambda: strategy_of(Banded(bands=4)), "bands=4: must be at most min_separation=3"),
        (lambda: strategy_of(num_rounds=0), "num_rounds"),
        (lambda: strategy_of(server_momentum=1.0), "server_momentum=1"),
        (lambda: strategy_of(server_learning_rate=0.0), "server_learning_rate=0"),
        (lambda: strategy_of(cooldown=1.5), "cooldown=1.5"),
        (lambda: strategy_of(num_clients=1), "cohort_size=2"),
        (
            lambda: strategy_of(evaluation=PrivateEvaluation(noise_multiplier=1.0, sampling=SAMPLING)),
            "an evaluation keeps no separation",
        ),
        (lambda: FedSMP(**WORDS, noise=BLT()), "unexpected keyword argument 'noise'"),
    ],
)
def test_what_does_not_go_together_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_server_optimizer_moves_the_model_by_what_was_released():
    strategy = strategy_of(server_optimizer=FedAvgM(server_learning_rate=0.5, server_momentum=0.9))
    start(strategy, Grid())
    assert strategy.statement.private


def test_clients_are_promised_the_noise_of_the_whole_run():
    """A policy that needs more refuses, although each row of Z has more."""
    grid, strategy = Grid(), strategy_of()
    grid.before = lambda _: None
    whole = Z / strategy.rules.noise.matrix.sensitivity(SCHEMA)
    start(strategy, grid)
    instruction = next(message for message in grid.sent if asks_to_train(message)).content.config_records
    (asked,) = [json.loads(record[wire.KEY])["ask"] for record in instruction.values()]
    assert asked["promise"]["noise_multiplier"] == pytest.approx(whole)
    assert asked["separation"]["whole_run"]


def test_the_log_does_not_judge_the_noise_of_one_round(caplog):
    with caplog.at_level(logging.WARNING):
        start(strategy_of(noise_multiplier=50.0), Grid())
    assert "so one round teaches little" not in caplog.text
    with caplog.at_level(logging.WARNING):
        start(DPFedAvg(**WORDS | {"noise_multiplier": 50.0}), Grid())
    assert "so one round teaches little" in caplog.text


def test_what_is_released_lies_on_the_lattice():
    """The noised sum, not the model: its float32 has fewer digits."""
    noise, total = strategy_of().rules.noise, np.zeros(1000)
    begun, _ = noise.begin(None, 1, 1000, np.random.default_rng(1))
    noise.add(total, begun, step=2.0**-12, num_replies=2, cohort_size=2, rng=np.random.default_rng(1))
    assert np.array_equal(total * 2**12, np.rint(total * 2**12))
    assert np.abs(total - begun).max() <= 2.0**-13
    assert begun.std() > 0.9


def test_two_continuations_of_one_folder_share_no_new_noise(tmp_path):
    """A copy of the run's folder that goes on beside it: the two models of a round differ by noise, not by updates alone."""
    folder, models = tmp_path / "run", []
    start_killed(strategy_of(), folder, server_round=4)
    shutil.copytree(folder, tmp_path / "copy")
    for place in (folder, tmp_path / "copy"):
        models.append({})
        start(strategy_of(), Grid(), place, resume=True, models=models[-1])
    differences = [models[0][number] - models[1][number] for number in range(5, ROUNDS + 1)]
    assert min(np.std(difference) for difference in differences) > 0.5 * Z * CLIP / COHORT


@pytest.mark.parametrize("noise", [BLT(), None], ids=["correlated", "independent"])
def test_a_resumed_run_refuses_clients_whose_names_are_new(noise, tmp_path):
    """Stock clients of a simulation are named by their nodes' ids, which are new in every run of Flower."""

    def simulated():
        grid = LocalGrid(stock_app(shifted(lambda node: 0.0)), CLIENTS)
        grid.simulated = True
        return grid

    folder, first, model = tmp_path / "run", simulated(), arrays(w=np.zeros(5, np.float32))
    made = (lambda: strategy_of(noise)) if noise else (lambda: DPFedAvg(**WORDS))
    send = first.send_and_receive

    def dies(messages, *, timeout=None):
        messages = list(messages)
        if any(int(message.metadata.group_id) == 3 for message in messages if asks_to_train(message)):
            raise Killed
        return send(messages, timeout=timeout)

    first.send_and_receive = dies
    with pytest.raises(Killed):
        made().start(first, model, ROUNDS, checkpoint_dir=folder)
    second = simulated()
    with pytest.raises(ValueError, match=r"'node-1' is named by its node's id, which is new in a resumed run"):
        made().start(second, model, ROUNDS, checkpoint_dir=folder, resume=True)
    assert not any(map(asks_to_train, second.sent))


def test_clients_that_come_one_after_another_can_start_a_run_together():
    """Of phones a few are connected at a time; cohorts are drawn from those alone."""
    strategy, grid = strategy_of(num_clients=6), Grid()
    looks = iter([{1, 2}, {3, 4}, {5, 6}])
    grid.get_node_ids = lambda: sorted(next(looks, {1, 5}))
    start(strategy, grid)
    assert strategy.num_clients == 6
    assert {name for _, name in grid.asked} == {"c1", "c5"}
    poisson = DPFedAvg(**WORDS | {"sampling": FullSampling()}, registration_timeout=1.0)
    looks = iter([{1, 2}, {3, 4}, {5, 6}])
    with pytest.raises(TimeoutError, match="only 2 clients"):
        start(poisson, grid)


def test_a_statement_says_who_may_know_the_cohorts_also_with_sampled_evaluations():
    plan = PrivateEvaluation(noise_multiplier=4.0, sampling=PoissonSampling(sampling_rate=0.5), every=2)
    strategy = strategy_of(evaluation=plan)
    start(strategy, Grid())
    lines = strategy.statement.assumptions
    assert not any("learns a round's cohort" in line for line in lines)
    assert any("learns who evaluates" in line for line in lines)
    assert any("No client takes part more than 3 times, or again within 3 rounds" in line for line in lines)
