"""Noise that is correlated over rounds: its state is secret, on the disk before messages leave, and never drawn from twice."""

import copy
import pickle
import shutil

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from flower_dp.core.serialization import load_bytes
from flower_dp.privacy import accounting
from flower_dp.privacy.private_file import LedgerError
from flower_dp.privacy.store import Store
from flower_dp.strategies import session, writer
from flower_dp.strategies.checkpoint import NOISE, CheckpointError, CheckpointFolder
from flower_dp.strategies.writer import LEDGER
from tests.banded import BANDED, BandedStrategy
from tests.grids import LocalGrid, asks_to_train
from tests.stock import arrays, shifted, stock_app

NUM_ROUNDS, SIZE = 8, 5
POINTS = ("before the charge", "charged", "noise written", "messages sent", "replied", "learnt", "snapshot")


class Killed(BaseException):
    """The server's process has ended."""


class Grid(LocalGrid):
    """Stock clients whose updates are zero, so that what a round releases is its noise; some rounds have no reply."""

    def __init__(self, silent=()):
        super().__init__(stock_app(shifted(lambda node: 0.0)), 4, tamper=self._silent)
        self.silent, self.rounds, self.watch = silent, [], lambda server_round: None
        self.kill = lambda point, server_round: None

    def _silent(self, node, reply):
        return [] if int(reply.metadata.group_id) in self.silent else [reply]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        rounds = {int(message.metadata.group_id) for message in messages if asks_to_train(message)}
        for server_round in rounds:
            self.rounds.append(server_round)
            self.watch(server_round)
            self.kill("messages sent", server_round)
        replies = super().send_and_receive(messages, timeout=timeout)
        for server_round in rounds:
            self.kill("replied", server_round)
        return replies


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """A checkpoint after every round, however short."""
    monkeypatch.setattr(writer, "_SHARE", 1.0)


def start(strategy, grid, folder, *, resume=False, models=None):
    def keep(server_round, record):
        if models is not None:
            models[server_round] = record["w"].numpy().astype(np.float64)

    return strategy.start(
        grid, arrays(w=np.zeros(SIZE, np.float32)), NUM_ROUNDS, checkpoint_dir=folder, resume=resume, evaluate_fn=keep
    )


def secret(folder):
    return load_bytes((folder / NOISE).read_bytes())


def test_the_released_noise_is_that_of_the_band_and_costs_one_event(tmp_path):
    """C n is Z again, which is independent from round to round."""
    strategy, models = BandedStrategy(), {}
    start(strategy, Grid(), tmp_path / "run", models=models)
    released = [2 * (models[number] - models[number - 1]) for number in range(1, NUM_ROUNDS + 1)]
    np.testing.assert_allclose(released, [drawn.noise for drawn in strategy.drawn], atol=1e-2)
    for last, drawn in zip(strategy.drawn, strategy.drawn[1:], strict=False):
        assert np.array_equal(drawn.before[0], last.noise)
    by_hand = accounting.epsilon(GaussianDpEvent(1 / np.sqrt(4 * 1.25)), delta=1e-3, relation="add-or-remove-one")
    assert strategy.statement.epsilon == pytest.approx(by_hand.epsilon)
    assert strategy.charges.numbers() == {BANDED: NUM_ROUNDS}


def test_the_secret_state_is_on_the_disk_before_the_messages_of_its_round_leave(tmp_path):
    strategy, grid, folder, seen = BandedStrategy(), Grid(), tmp_path / "run", []

    def look(server_round):
        found = secret(folder)
        assert found.charged == {BANDED: server_round}
        assert np.array_equal(found.secret[BANDED][0], strategy.drawn[-1].noise)
        assert (folder / NOISE).stat().st_mode & 0o77 == 0
        seen.append(server_round)

    grid.watch = look
    start(strategy, grid, folder)
    assert seen == list(range(1, NUM_ROUNDS + 1))


def test_a_state_that_cannot_be_written_sends_no_message(tmp_path, monkeypatch):
    def full(self, noise):
        raise OSError("the disk is full")

    monkeypatch.setattr(CheckpointFolder, "write_noise", full)
    strategy, grid = BandedStrategy(), Grid()
    with pytest.raises(OSError, match="full"):
        start(strategy, grid, tmp_path / "run")
    assert grid.rounds == []
    assert strategy.charges.number(BANDED) == 1


def killed(monkeypatch, grid, folder, to, *, at, in_round):
    """Let the process end at a point of a round: nothing that is written later is there when the run goes on."""

    def kill(point, server_round):
        if (point, server_round) == (at, in_round):
            shutil.copytree(folder, to)
            raise Killed

    def around(owner, name, before, after):
        call = getattr(owner, name)

        def counted(self, *arguments, **named):
            kill(before, rounds_of(self, arguments))
            value = call(self, *arguments, **named)
            kill(after, rounds_of(self, arguments))
            return value

        monkeypatch.setattr(owner, name, counted)

    def rounds_of(self, arguments):
        first = arguments[-1]
        if isinstance(self, Store):
            return first.server_round
        if isinstance(self, writer.Writer):
            return arguments[1][BANDED]
        return arguments[0] if isinstance(self, session.Session) else first.server_round

    around(Store, "append", "before the charge", "charged")
    around(writer.Writer, "noise", "", "noise written")
    around(session.Session, "next_model", "", "learnt")
    around(CheckpointFolder, "write", "", "snapshot")
    grid.kill = kill


@pytest.mark.parametrize("in_round", [1, 3])
@pytest.mark.parametrize("at", POINTS)
def test_after_a_crash_at_any_point_noise_is_not_drawn_twice_and_what_was_released_is_charged(
    at, in_round, tmp_path, monkeypatch
):
    folder, copied = tmp_path / "run", tmp_path / "copied"
    first, grid = BandedStrategy(), Grid()
    with monkeypatch.context() as patch:
        killed(patch, grid, folder, copied, at=at, in_round=in_round)
        with pytest.raises(Killed):
            start(first, grid, folder)
    left = set(grid.rounds)
    # Noise that was drawn and not written was in no message.
    written = left | ({in_round} if at == "noise written" else set())
    draws = [drawn for drawn in first.drawn if drawn.number in written]
    again, other = BandedStrategy(), Grid()
    start(again, other, copied, resume=True)
    assert left.isdisjoint(other.rounds)
    assert again.charges.number(BANDED) >= len(left | set(other.rounds))
    with Store(copied / LEDGER, read_only=True) as ledger:
        assert ledger.num_charges == again.charges.number(BANDED) == NUM_ROUNDS
    if draws:
        assert np.array_equal(again.drawn[0].before[0], draws[-1].noise)
    assert len({drawn.noise.tobytes() for drawn in [*draws, *again.drawn]}) == len(draws) + len(again.drawn)
    assert len({drawn.number for drawn in [*draws, *again.drawn]}) == len(draws) + len(again.drawn)


def test_damaged_noise_ends_the_run(tmp_path):
    folder, strategy = tmp_path / "run", BandedStrategy()
    grid = Grid(range(2, 99))
    with pytest.raises(RuntimeError, match="no client has sent"):
        start(strategy, grid, folder)
    (folder / NOISE).write_bytes(b"?")
    with pytest.raises(CheckpointError, match="noise"):
        start(BandedStrategy(), Grid(), folder, resume=True)


def test_going_back_after_silent_rounds_does_not_roll_the_noise_back(tmp_path):
    folder, strategy = tmp_path / "run", BandedStrategy()
    with pytest.raises(RuntimeError, match="no client has sent"):
        start(strategy, Grid(range(2, 99)), folder)
    last = strategy.drawn[-1]
    assert len(strategy.rounds) == 1
    assert last.number == strategy.charges.number(BANDED) == 7
    assert np.array_equal(strategy.state.secret[BANDED][0], last.noise)
    again = BandedStrategy()
    start(again, Grid(), folder, resume=True)
    assert np.array_equal(again.drawn[0].before[0], last.noise)
    assert again.drawn[0].number == last.number + 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_does_not_release_noise_a_second_time(how):
    strategy, grid = BandedStrategy(), Grid()
    made = copy.deepcopy if how == "deepcopy" else lambda one: pickle.loads(pickle.dumps(one))  # noqa: S301
    model = arrays(w=np.zeros(SIZE, np.float32))
    model, _ = strategy.aggregate_train(1, grid.send_and_receive(strategy.configure_train(1, model, {}, grid)))
    strategy._session._manager = None  # knows the grid, which has functions
    between = made(strategy)
    messages = strategy.configure_train(2, model, {}, grid)
    strategy._session._manager = None
    within = made(strategy)
    with pytest.raises(RuntimeError, match="configure_train"):
        within.aggregate_train(2, grid.send_and_receive(messages))
    with pytest.raises(LedgerError, match="has continued the run"):
        between.configure_train(2, model, {}, grid)
    strategy.aggregate_train(2, grid.send_and_receive(messages))
    within.configure_train(3, model, {}, grid)
    assert np.array_equal(within.drawn[-1].before[0], strategy.drawn[1].noise)
    with pytest.raises(LedgerError, match="has continued the run"):
        strategy.configure_train(3, model, {}, grid)
