"""Rounds in which clients are asked and none answers: the run ends, with the model before them and the cost of all that was charged."""

import contextlib

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.strategies import AdaptiveClip, DPFedAvg, EvaluationBudget, PrivateEvaluation, writer
from flower_dp.strategies.checkpoint import CheckpointFolder
from flower_dp.strategies.releases.noised_sum import NoisedSum, SumState
from flower_dp.wire import EVALUATION
from tests.grids import LocalGrid
from tests.stock import arrays, shifted, stock_app
from tests.strategies.test_local_evaluation import METHODS, flat, grid_of, opened

ROUNDS = 8


def strategy(**arguments):
    words = {"clip_norm": 0.5, "noise_multiplier": 1.0, "sampling": FullSampling(), "num_clients": 4, "delta": 1e-3}
    return DPFedAvg(**words | arguments)


def app():
    made = stock_app(shifted(float))

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5, "num-examples": 1})}), reply_to=message)

    return made


class Grid(LocalGrid):
    """Nodes that are silent in these rounds, or evaluate in none of those."""

    def __init__(self, silent, num_nodes=4, *, unevaluated=()):
        super().__init__(app(), num_nodes, tamper=self._silent)
        self.silent, self.unevaluated = silent, unevaluated

    def _silent(self, node, reply):
        return [] if int(reply.metadata.group_id) in self.silent else [reply]

    def send_and_receive(self, messages, *, timeout=None):
        return [reply for reply in super().send_and_receive(messages, timeout=timeout) if self._evaluates(reply)]

    def _evaluates(self, reply):
        return reply.metadata.message_type != "evaluate" or int(reply.metadata.group_id) not in self.unevaluated

    def asked(self, kind):
        """The rounds in which clients were asked to train, or to evaluate."""
        return sorted({int(one.metadata.group_id) for one in self.sent if one.metadata.message_type == kind})


def start(made, grid, folder=None, *, num_rounds=ROUNDS, **arguments):
    model = arrays(w=np.zeros(4, np.float32))
    return made.start(grid, model, num_rounds=num_rounds, checkpoint_dir=folder, **arguments)


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """A checkpoint after every round, however short."""
    monkeypatch.setattr(writer, "_SHARE", 1.0)


KINDS = {
    "plain": {},
    "adaptive clip": {
        "clip_norm": AdaptiveClip(initial_clip_norm=0.5, count_noise_std=2.0, min_clip_norm=0.01, max_clip_norm=10.0)
    },
    "server optimizer": {"server_optimizer": FedAdam()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_three_silent_rounds_end_the_run_with_the_model_before_them(kind, tmp_path):
    made, folder = strategy(**KINDS[kind]), tmp_path / "run"
    with pytest.raises(RuntimeError, match=r"no client has sent a usable update in the last 3 rounds.*resume the run"):
        start(made, Grid(range(3, 99)), folder)
    five = strategy(**KINDS[kind])
    start(five, Grid(()), num_rounds=5)
    assert (made.statement.num_charged_rounds, made.epsilon) == (5, pytest.approx(five.epsilon))
    assert made.statement.epsilon == pytest.approx(five.statement.epsilon)
    assert len(made.rounds) == 2
    assert "rounds 3 to 5 were charged and not finished" in made.statement.incidents
    assert "12 requested updates did not count" in " ".join(str(made.statement).split())
    kept = CheckpointFolder(folder).read()
    assert kept.server_round == 2
    assert np.array_equal(kept.arrays["w"], made.state.model)
    again, grid = strategy(**KINDS[kind]), Grid(())
    start(again, grid, folder, resume=True)
    assert grid.asked("train") == [6, 7, 8]
    assert again.statement.num_charged_rounds == 8


def test_the_kept_model_is_that_of_the_last_round_with_a_reply():
    models = {}
    made = strategy()
    with pytest.raises(RuntimeError, match="in the last 3 rounds"):
        start(made, Grid(range(4, 99)), evaluate_fn=lambda number, record: models.update({number: record["w"].numpy()}))
    assert np.array_equal(made.state.model, models[3])
    assert not np.array_equal(models[4], models[3])


def test_silent_rounds_with_a_reply_between_them_end_no_run():
    made = strategy()
    start(made, Grid((2, 3, 5, 6)))
    assert [report.replies for report in made.rounds] == [4, 0, 0, 4, 0, 0, 4, 4]


def test_few_clients_a_round_may_be_away_for_a_while():
    """Of thirty clients at least, in three rounds at least: one of ten in ten rounds is no sign."""
    made = strategy(num_clients=100, sampling=RoundRobinSampling(cohort_size=1))
    start(made, Grid(range(2, 12), num_nodes=100), num_rounds=12)
    assert len(made.rounds) == 12


def test_rounds_in_which_nobody_was_asked_do_not_count():
    made = strategy(num_clients=4, sampling=PoissonSampling(sampling_rate=1e-6), noise_seed=1)
    start(made, Grid(()))
    assert [report.cohort_size for report in made.rounds] == [0] * ROUNDS


EVALUATED = {"evaluation": PrivateEvaluation(noise_multiplier=0.1, sampling=FullSampling())}
ENDED = "no client has answered the last 3 private evaluations: they stay charged, and the run has no more of them"


@pytest.mark.parametrize("first", [1, 3])
def test_evaluations_that_nobody_answers_end_and_training_goes_on(first, caplog):
    made, grid = strategy(**EVALUATED), Grid((), unevaluated=range(first, 99))
    start(made, grid)
    # Of four clients each time: twelve that were asked in vain are as many as end a run.
    assert list(made.charges.numbers().values()) == [ROUNDS, first + 2]
    assert grid.asked("evaluate") == list(range(1, first + 3))
    assert [report.replies for report in made.rounds] == [4] * ROUNDS
    assert made.statement.incidents.count(ENDED) == 1
    assert f"{first + 2} private evaluations" in " ".join(str(made.statement).split())
    assert [record.getMessage() for record in caplog.records].count(f"{ENDED}; training continues") == 1


def test_evaluations_with_an_answer_between_them_go_on():
    made, grid = strategy(**EVALUATED), Grid((), unevaluated=(1, 2, 4, 5, 7, 8))
    start(made, grid)
    assert grid.asked("evaluate") == list(range(1, ROUNDS + 1))
    assert list(made.evaluations) == [3, 6]
    assert ENDED not in made.statement.incidents


def test_evaluations_that_nobody_was_asked_for_end_none():
    made = strategy(
        evaluation=PrivateEvaluation(noise_multiplier=0.1, sampling=PoissonSampling(sampling_rate=1e-6)), noise_seed=1
    )
    start(made, Grid(()))
    assert made.charges.number(EVALUATION) == ROUNDS


def test_few_clients_an_evaluation_may_be_away_for_a_while():
    one = RoundRobinSampling(cohort_size=1)
    made = strategy(num_clients=100, evaluation=PrivateEvaluation(noise_multiplier=0.01, sampling=one))
    start(made, Grid((), num_nodes=100, unevaluated=range(2, 99)), num_rounds=ROUNDS)
    assert made.charges.number(EVALUATION) == ROUNDS


def test_the_count_of_unanswered_evaluations_survives_a_resume(tmp_path):
    def evaluate_fn(server_round, record):
        if server_round == after:
            raise KeyboardInterrupt

    charged = []
    for after in (2, 5, 99):  # after two evaluations, after the last, never
        made, grid = strategy(**EVALUATED), Grid((), unevaluated=range(1, 99))
        with contextlib.suppress(KeyboardInterrupt):
            start(made, grid, tmp_path / "run", resume=after > 2, evaluate_fn=evaluate_fn)
        charged.append(made.charges.number(EVALUATION))
    assert charged == [2, 3, 3]
    assert grid.asked("evaluate") == []
    assert made.statement.num_charged_rounds == ROUNDS
    assert made.statement.incidents.count(ENDED) == 1


def test_a_run_that_goes_back_before_silent_rounds_evaluates_again(tmp_path):
    """Clients were away: what they did not evaluate meanwhile says nothing of later."""
    with pytest.raises(RuntimeError, match="in the last 3 rounds"):
        start(strategy(**EVALUATED), Grid(range(3, 99), unevaluated=range(3, 99)), tmp_path / "run")
    made, grid = strategy(**EVALUATED), Grid((), unevaluated=(6, 7))
    start(made, grid, tmp_path / "run", resume=True)
    assert grid.asked("evaluate") == [6, 7, 8]
    assert ENDED not in made.statement.incidents


def counted(monkeypatch, number, grid, *, rate=0.5):
    """A run whose evaluating cohorts are secret, and whose noised number of those who answered is this."""
    plan = PrivateEvaluation(noise_multiplier=1.0, sampling=PoissonSampling(sampling_rate=rate))
    made = strategy(num_clients=40, evaluation=plan)

    own = NoisedSum.noised

    def noised(self, *given):
        if self.metrics is None:
            return own(self, *given)
        return np.array([0.0, number]) / (np.sqrt(2) * self.release.expected_cohort_size), SumState()

    monkeypatch.setattr(NoisedSum, "noised", noised)
    start(made, grid)
    return made


@pytest.mark.parametrize("silent", [True, False])
def test_the_noised_number_alone_ends_evaluations_where_cohorts_are_secret(silent, monkeypatch):
    """If the true number decided, evaluations that go on would tell that somebody has answered: with all others silent, who."""

    def grid():
        return Grid((), num_nodes=40, unevaluated=range(1, 99) if silent else ())

    ended = counted(monkeypatch, 0.3, grid())
    # Twenty clients are expected each time; three times that is more than enough.
    assert ended.charges.number(EVALUATION) == 3
    assert ended._session.record.unanswered_evaluations == (20, 20, 20)
    assert f"{ENDED}, as far as their noised results tell" in ended.statement.incidents
    # A usable number; one that is of no use, and nearer to the four that are expected than to none.
    for number, rate in ((20.0, 0.5), (3.9, 0.1)):
        assert counted(monkeypatch, number, grid(), rate=rate).charges.number(EVALUATION) == ROUNDS


@pytest.mark.parametrize("method", METHODS)
def test_evaluations_by_single_clients_that_nobody_answers_end(method):
    """The clients' budgets would cover ten evaluations."""
    budget = EvaluationBudget(epsilon=0.5, num_evaluations=10)
    grid = grid_of(METHODS[method][1], budget)
    made = opened(method, grid, budget)
    for server_round in range(1, ROUNDS + 1):
        made.configure_evaluate(server_round, flat(), {}, grid)
        made.aggregate_evaluate(server_round, [])
    assert made.rules.evaluation.counts(made.charges) == dict.fromkeys(["c0", "c1", "c2", "c3"], 3)
    assert made.statement.incidents.count(ENDED) == 1


def test_evaluations_that_have_ended_stay_so_when_the_run_goes_back(tmp_path):
    """They end with the one of round 4, and the run with that round and the two before it, which are silent."""
    away = Grid(range(3, 99), unevaluated=range(2, 99))
    with pytest.raises(RuntimeError, match="in the last 3 rounds"):
        start(strategy(**EVALUATED), away, tmp_path / "run")
    made, grid = strategy(**EVALUATED), Grid(())
    start(made, grid, tmp_path / "run", resume=True)
    assert grid.asked("evaluate") == []
    assert made.statement.incidents.count(ENDED) == 1
