"""Runs that go on: a method of each kind, interrupted wherever a round can be, and resumed by a new strategy."""

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

from flower_dp import record_run, wire
from flower_dp.clients import model_arrays
from flower_dp.core.checks import SettingsError
from flower_dp.core.sampling import FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy.private_file import LedgerError, ownership_error
from flower_dp.privacy.store import Store
from flower_dp.strategies import AdaptiveClip, DPFedAvg, PrivateEvaluation, writer
from flower_dp.strategies.checkpoint import NEWEST, PREVIOUS, CheckpointError
from tests.adversaries.fuzzing import THOROUGH
from tests.chance import chance_of
from tests.contract_runs import SEED, SMALL, app_of, evaluating_stock_app
from tests.contracts import METHODS, Method, Words
from tests.gaps import Killed
from tests.grids import LocalGrid, asks_to_train
from tests.stock import arrays, shifted, stock_app
from tests.strategies.test_journal import OwnLoop
from tests.test_contract import of_each_kind, some_methods

LEDGER, EVALUATION = "ledger.sqlite", wire.EVALUATION
WORDS = {"clip_norm": 0.5, "noise_multiplier": 1.0, "num_clients": 4, "delta": 1e-3}


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """A checkpoint after every round, however short."""
    monkeypatch.setattr(writer, "_SHARE", 1.0)


class DyingGrid(LocalGrid):
    """The process ends in one exchange of rounds, before its messages have left (`push`) or when they are answered (`pull`)."""

    dies: tuple[str, int, str] | None = None
    folder: Path
    exchanges: Counter[str]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        kinds = {one.metadata.message_type for one in messages if asks_to_train(one) or one.metadata.message_type == "evaluate"}
        kind = next(iter(kinds), "")
        self.exchanges = getattr(self, "exchanges", Counter())
        self.exchanges[kind] += 1
        here = self.dies is not None and (kind, self.exchanges[kind]) == self.dies[:2]
        if here and self.dies[2] != "pull":
            if self.dies[2] == "kill -9":
                shutil.copytree(self.folder, self.folder.with_name("killed"))
            self.dies = None
            raise Killed
        replies = super().send_and_receive(messages, timeout=timeout)
        if here:
            self.dies = None
            raise Killed
        return replies

    def rounds_sent(self, kind: str = "train") -> list[int]:
        """The rounds in which each node was asked; in every one of them all nodes are."""
        sent = [one for one in self.sent if one.metadata.message_type == kind and (kind != "train" or asks_to_train(one))]
        counts = Counter(int(message.metadata.group_id) for message in sent)
        assert set(counts.values()) <= {len(self.contexts)}
        return sorted(counts)


def bits(model: ArrayRecord) -> bytes:
    return b"".join(array.numpy().tobytes() for array in model.values())


@dataclass
class Case:
    """A run that is started again and again in one folder, each time by a new strategy."""

    make: Any
    grid: DyingGrid
    model: ArrayRecord
    folder: Path
    num_rounds: int = 3
    models: dict[int, bytes] = field(default_factory=dict)
    fails: int | None = None
    result: Any = None

    def evaluate(self, server_round: int, model: ArrayRecord) -> MetricRecord:
        if server_round == self.fails:
            self.fails = None
            raise Killed
        self.models[server_round] = bits(model)
        return MetricRecord({"loss": abs(server_round - 1.0), "round": server_round})

    def start(self, *, resume: bool = True) -> Any:
        strategy = self.make()
        self.grid.folder = self.folder
        self.result = None
        words = {"num_rounds": self.num_rounds, "evaluate_fn": self.evaluate, "checkpoint_dir": self.folder, "resume": resume}
        try:
            self.result = strategy.start(self.grid, self.model, **words)
        except Killed:
            if (killed := self.folder.with_name("killed")).exists():  # nothing was written after
                shutil.rmtree(self.folder)
                killed.rename(self.folder)
        return strategy


def case_of(method: Method, folder: Path, arguments: Words, noise_seed: int | None = None) -> Case:
    app = app_of(method, arguments, SMALL, num_nodes=arguments.num_clients, noise_seed=noise_seed)
    return Case(lambda: method.strategy(arguments), DyingGrid(app, arguments.num_clients), model_arrays(SMALL.model()), folder)


def alike(one: Any, other: Any) -> bool:
    """Whether two parts of statements say the same, numbers up to rounding."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other)


@cache
def told_of_a_whole_run(method: Method) -> dict[str, Any]:
    """What a run tells that is never interrupted."""
    with chance_of(method.label), TemporaryDirectory() as folder:
        return told(case_of(method, Path(folder) / "whole", Words()).start(resume=False))


def told(strategy: Any) -> dict[str, Any]:
    """The statement, without what happened and what came of it."""
    said = strategy.statement.to_dict()
    # How far a client that lies moves the model is told in numbers once a round was finished.
    lines = [line.partition(" In a round with")[0] for line in said["assumptions"]]
    said["assumptions"] = [line for line in lines if "was chosen out of" not in line]
    if said["method"] == "NbAFL":  # a broadcast that was not sent costs nothing
        said["adversaries"] = [one for one in said["adversaries"] if one["name"] == "the server"]
    return {name: value for name, value in said.items() if name not in ("incidents", "missing")}


def deaths() -> Iterator[Any]:
    """Every round in each of three ways; of these nine cases one or two a method, in turn, or all of them if tests are thorough."""
    methods = [method for method in METHODS if THOROUGH or not method.variant]
    for place, method in enumerate(methods):
        for number, (at, when) in enumerate(itertools.product((1, 2, 3), ("push", "pull", "kill -9"))):
            if THOROUGH or (place + number) % 7 == 4:
                yield pytest.param(method, at, when, id=f"{method.label}-{at}-{when}")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "at", "when"), list(deaths()))
def test_a_round_that_was_charged_and_not_finished_stays_charged_and_is_not_released_again(method, at, when, tmp_path):
    arguments, numbers = Words(), (1, 2, 3)
    case = case_of(method, tmp_path / "run", arguments)
    case.grid.dies = ("train", at, when)
    first = case.start(resume=False)
    incident = f"round {at} was charged and not finished"
    assert first.statement.num_charged_rounds == at
    assert first.statement.epsilon == pytest.approx(method.epsilon(arguments, at), rel=1e-3)
    assert incident in first.statement.incidents
    again = case.start()
    assert case.result is not None
    assert again.incidents.count(incident) == 1
    assert [report.server_round for report in again.rounds] == [number for number in numbers if number != at]
    assert case.grid.rounds_sent() == [number for number in numbers if number != at or when == "pull"]
    assert alike(told(again), told_of_a_whole_run(method))
    # Noise is new: no two rounds have the same.
    assert len(set(case.models.values())) == len(case.models)


@pytest.mark.slow
@some_methods(lambda method: method.label in {"dp-fedsam distributed, adaptive clip", "dp-pasgd", "scaffold", "nbafl"})
def test_rounds_after_the_last_checkpoint_stay_charged(method, tmp_path, monkeypatch):
    """The process is killed after rounds so short that no checkpoint was written since the one before the first."""
    monkeypatch.setattr(writer, "_SHARE", 1e-9)
    case = case_of(method, tmp_path / "run", Words())
    case.grid.dies = ("train", 3, "kill -9")
    case.start(resume=False)
    again = case.start()
    assert again.incidents[0] == "rounds 1 to 3 were charged and not finished"
    assert case.grid.rounds_sent() == [1, 2]
    assert alike(told(again), told_of_a_whole_run(method))


@pytest.mark.slow
@of_each_kind
def test_a_run_that_goes_on_between_two_rounds_ends_as_one_that_never_stopped(method, tmp_path):
    """To the last bit, where noise is from a fixed seed, as only tests have it: in rounds that were not begun it is the same."""
    arguments = Words(noise_seed=SEED)
    whole = case_of(method, tmp_path / "whole", arguments, noise_seed=SEED)
    expected = whole.start(resume=False)
    case = case_of(method, tmp_path / "run", arguments, noise_seed=SEED)
    for case.fails in (1, 3):
        case.start()
    strategy = case.start()
    assert case.models == whole.models
    assert strategy.statement == expected.statement
    # DP-PASGD keeps the best model by `evaluate_fn`, that of a process that has died too.
    assert bits(case.result.arrays) == bits(whole.result.arrays) == whole.models[1 if method.name == "dp-pasgd" else 3]
    assert case.result.evaluate_metrics_serverapp == whole.result.evaluate_metrics_serverapp
    assert list(case.result.train_metrics_clientapp) == [1, 2, 3]


# What a state has besides


def stock_case(folder: Path, num_rounds: int = 4, evaluates: bool = False, model: Any = None, **words: Any) -> Case:
    grid = DyingGrid(evaluating_stock_app() if evaluates else stock_app(shifted(lambda node: 0.1 * node)), 4)

    def make() -> DPFedAvg:
        return DPFedAvg(**WORDS | {"sampling": FullSampling(), "noise_seed": 3} | words)

    return Case(make, grid, model or arrays(**{"0.weight": np.zeros((3, 6), np.float32)}), folder, num_rounds)


OPTIMIZERS = (FedAdam(eta=0.1), FedYogi(eta=0.1), FedAdagrad(eta=0.1), FedAvgM(server_momentum=0.9), FedAvgM())


def evaluation(every: int) -> PrivateEvaluation:
    return PrivateEvaluation(noise_multiplier=0.1, sampling=FullSampling(), every=every)


@pytest.mark.parametrize(
    "words",
    [
        *({"server_optimizer": one} for one in OPTIMIZERS),
        {"clip_norm": AdaptiveClip(initial_clip_norm=0.5, min_clip_norm=0.01, max_clip_norm=10.0)},
        {"sampling": RoundRobinSampling(cohort_size=1)},
        {"sampling": PoissonSampling(sampling_rate=0.5)},
        {"evaluation": evaluation(2), "evaluates": True},
        {"evaluation": evaluation(1), "evaluates": True},
    ],
    ids=["adam", "yogi", "adagrad", "momentum", "plain", "adaptive clip", "in turn", "poisson", "evaluation", "evaluations"],
)
def test_all_that_a_run_carries_on_is_in_its_checkpoint(words, tmp_path):
    whole, case = stock_case(tmp_path / "whole", **words), stock_case(tmp_path / "run", **words)
    expected = whole.start()
    for case.fails in (2, 4, 1):
        strategy = case.start()
    strategy = case.start()
    assert case.models == whole.models
    assert strategy.statement == expected.statement
    for metrics in ("train", "evaluate"):
        there, here = (getattr(one.result, f"{metrics}_metrics_clientapp") for one in (whole, case))
        assert list(here) == list(there)


def charged(case: Case) -> list[tuple[str, int]]:
    """Release and round of every charge in the run's ledger."""
    with Store(case.folder / LEDGER, read_only=True) as ledger:
        return [(charge.release, charge.server_round) for run in ledger.runs for charge in ledger.read(run)]


@pytest.mark.parametrize("when", ["push", "pull", "kill -9"])
def test_an_evaluation_that_was_charged_and_not_finished_is_not_made_again(when, tmp_path):
    case = stock_case(tmp_path / "run", evaluation=evaluation(2), evaluates=True)
    case.grid.dies = ("evaluate", 1, when)
    first = case.start(resume=False)
    # The process that is killed has nothing to say; the next one has.
    assert "the evaluation of round 2 was charged and not finished" in first.incidents
    strategy = case.start()
    assert [number for release, number in charged(case) if release == EVALUATION] == [2, 4]
    assert list(strategy.evaluations) == [4]
    assert case.grid.rounds_sent("evaluate") == ([2, 4] if when == "pull" else [4])
    lost = ["round 2 was charged and not finished"] if when == "kill -9" else []
    assert list(strategy.incidents) == [*lost, "the evaluation of round 2 was charged and not finished"]


def test_nor_is_it_made_again_for_one_that_is_still_owed(tmp_path):
    """The evaluation of round 1 was never asked for: that of round 2, which was interrupted, does not stand in for it."""
    case = stock_case(tmp_path / "run", evaluation=evaluation(1), evaluates=True)
    case.grid.dies = ("train", 1, "push")
    case.start(resume=False)
    case.grid.dies = ("evaluate", 1, "pull")
    case.start()
    strategy = case.start()
    assert case.grid.rounds_sent("evaluate") == [2, 3, 4]
    assert list(strategy.evaluations) == [3, 4]
    assert [release for release, _ in charged(case)].count(EVALUATION) == 3


# What is refused, and what is not run again


def test_a_run_that_has_ended_is_not_run_again(tmp_path):
    case = stock_case(tmp_path / "run")
    expected = case.start(resume=False)
    result, sent = case.result, len(case.grid.sent)
    strategy = case.start()
    assert len(case.grid.sent) == sent
    np.testing.assert_array_equal(case.result.arrays["0.weight"].numpy(), result.arrays["0.weight"].numpy())
    assert case.result.evaluate_metrics_serverapp == result.evaluate_metrics_serverapp
    assert strategy.statement == expected.statement


def test_a_folder_with_a_run_is_refused_and_keeps_it(tmp_path):
    case = stopped(tmp_path / "run")
    before = {file.name: file.read_bytes() for file in case.folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"already holds a run; resume=True resumes it"):
        case.start(resume=False)
    assert {file.name: file.read_bytes() for file in case.folder.iterdir()} == before
    assert case.start().statement.num_charged_rounds == 4


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"num_clients": 5}, "num_clients was 4, and is 5"),
        ({"num_rounds": 5}, "num_rounds was 4, and is 5"),
        ({"model": arrays(w=np.zeros(3, np.float32))}, "model was 1 arrays of 18 parameters"),
        ({"delta": 1e-4}, "delta was 0.001, and is 0.0001"),
        ({"server_optimizer": FedAdam()}, "server_optimizer was none, and is FedAdam"),
        ({"sampling": PoissonSampling(sampling_rate=0.9)}, r"sampling was FullSampling\(\), and is PoissonSampling"),
        ({"evaluation": evaluation(2)}, "evaluation was none, and is every 2 rounds"),
        ({"noise_multiplier": 2.0}, "the charges of"),
    ],
)
def test_a_run_goes_on_as_it_began(words, what, tmp_path):
    case = stopped(tmp_path / "run")
    other = stock_case(case.folder, **words)
    with pytest.raises(ValueError, match=what):
        other.start()
    assert case.start().statement.num_charged_rounds == 4


def stopped(folder: Path, fails: int = 2, **words: Any) -> Case:
    """A run that can go on."""
    case = stock_case(folder, **words)
    case.fails = fails
    case.start(resume=False)
    return case


def test_a_damaged_checkpoint_is_never_taken_for_none(tmp_path, caplog):
    case = stopped(tmp_path / "run", fails=3)
    newest, previous = case.folder / NEWEST, case.folder / PREVIOUS
    whole = newest.read_bytes()
    for changed in (whole[:-1], whole[:200], b"", whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], b"x" + whole):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        copy = stock_case(shutil.copytree(case.folder, tmp_path / "copy"))
        (copy.folder / NEWEST).write_bytes(changed)
        assert "round 3 was charged and not finished" in copy.start().incidents
    assert "the previous checkpoint is used" in caplog.text
    previous.unlink()
    for other in (b"1", b"2", b"4"):
        newest.write_bytes(whole.replace(b"state 3\n", b"state %s\n" % other, 1))
        with pytest.raises(CheckpointError, match=f"has format {int(other)}; this version of flower-dp reads format 3"):
            case.start()
    newest.unlink()
    previous.write_bytes(whole)  # killed between two renames
    assert case.start().statement.num_charged_rounds == 4


def test_a_checkpoint_is_its_owners_alone_and_one_that_others_could_have_written_is_not_taken(tmp_path):
    case = stopped(tmp_path / "run")
    assert case.folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in case.folder.iterdir()} == {0o600}
    for place, bits in itertools.product((case.folder, case.folder / NEWEST), (0o020, 0o002)):
        mode = place.stat().st_mode
        place.chmod(mode | bits)
        with pytest.raises(CheckpointError, match="others can write to it"):
            case.start()
        place.chmod(mode)
    assert case.start().statement.num_charged_rounds == 4
    owned = os.stat_result((0o700, 0, 0, 1, os.geteuid() + 1, 0, 0, 0, 0, 0))
    assert f"belongs to user {os.geteuid() + 1}" in str(ownership_error(owned))


@pytest.mark.parametrize(("began", "goes_on"), [(3, None), (None, 3)])
def test_a_run_goes_on_with_noise_from_a_seed_only_if_it_began_so_and_never_becomes_private(began, goes_on, tmp_path):
    """Other runs on its ledger take all of its charges for private ones, or none."""
    case = stopped(tmp_path / "run", noise_seed=began)
    other = stock_case(case.folder, noise_seed=goes_on)
    for _ in range(2):  # nor when it has ended
        with pytest.raises(SettingsError, match="noise_seed: the run began with" + ("out a seed" if goes_on else " a seed")):
            other.start()
        assert case.start().statement.private == (began is None)


def test_metrics_of_clients_stay_in_the_statement_of_a_run_that_goes_on_without_them(tmp_path):
    strategy = stock_case(tmp_path / "run").make()
    assert not any("CLIENT METRICS" in line for line in strategy.statement.not_covered)
    strategy.state = replace(strategy.state, client_metrics={1: {"client-loss": 0.5}})
    assert any("CLIENT METRICS" in line for line in strategy.statement.not_covered)


def test_a_checkpoint_of_another_run_is_refused_by_its_ledger(tmp_path):
    one, other = stopped(tmp_path / "one"), stopped(tmp_path / "other")
    shutil.copy(one.folder / NEWEST, other.folder / NEWEST)
    with pytest.raises(LedgerError, match="has no run"):
        other.start()
    (one.folder / LEDGER).unlink()
    with pytest.raises(LedgerError, match="does not exist"):
        one.start()


def test_two_copies_of_one_run_pay_for_each_other_on_a_shared_ledger(tmp_path):
    tmp_path.chmod(0o700)
    ledger = tmp_path / "shared.sqlite"
    Store.create(ledger)
    one = stopped(tmp_path / "one", ledger=ledger)
    copy = stock_case(tmp_path / "copy", ledger=ledger)
    shutil.copytree(one.folder, copy.folder)
    assert one.start().statement.num_charged_rounds == 4
    again = copy.start()
    assert again.statement.num_charged_rounds == 4
    assert "rounds 3 to 4 were charged and not finished" in again.incidents
    assert [report.server_round for report in again.rounds] == [1, 2]


@pytest.mark.parametrize("at_first", [False, True])
def test_a_full_disk_loses_no_run_and_one_without_a_first_checkpoint_charges_nobody(at_first, tmp_path, monkeypatch, caplog):
    """What was charged is in the ledger; a run that is killed has its statement from a checkpoint and the ledger."""
    case = stock_case(tmp_path / "run")
    replace = Path.replace

    def full(path: Path, target: Path) -> None:
        if at_first or (case.folder / NEWEST).exists():
            raise OSError(28, "No space left on device")
        replace(path, target)

    monkeypatch.setattr("flower_dp.strategies.checkpoint.Path.replace", full)
    if at_first:
        with pytest.raises(CheckpointError, match=r"no checkpoint can be written: \[Errno 28\] No space left on device"):
            case.start()
        assert not any(asks_to_train(message) for message in case.grid.sent)
        return
    assert case.start().statement.num_charged_rounds == 4
    assert "No space left on device; the previous one stays" in caplog.text
    assert not list(case.folder.glob(".*"))


def test_no_statement_without_a_checkpoint_says_that_nothing_was_charged(tmp_path, monkeypatch):
    """The checkpoints may be gone, and the ledger has charges."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    monkeypatch.setenv("FLOWER_DP_RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("FLOWER_DP_RESUME", "statement")
    case = stock_case(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint for a statement; `flower-dp ledger show .*sqlite` says what was"):
        record_run(case.make(), case.grid, arrays(), num_rounds=1, config={})


def test_no_new_run_takes_the_place_of_one_whose_checkpoints_are_gone(tmp_path):
    """Its statement would leave out what the ledger beside it has."""
    case = stopped(tmp_path / "run")
    for name in (NEWEST, PREVIOUS):
        (case.folder / name).unlink(missing_ok=True)
    sent = len(case.grid.sent)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="has charges of a run without a checkpoint"):
            case.start(resume=resume)
    assert not any(asks_to_train(message) for message in case.grid.sent[sent:])


@pytest.mark.parametrize("planned", [False, True])
def test_a_loop_of_ones_own_does_not_begin_anew_in_the_place_of_a_run(planned, tmp_path):
    """Nor does a run that was planned go on from one that was not."""
    own, plain = (lambda kind=kind: kind(**WORDS, sampling=FullSampling()) for kind in (OwnLoop, DPFedAvg))
    case = stock_case(tmp_path / "run")
    case.make = plain if planned else own
    case.fails = 2
    case.start(resume=False)
    sent = len(case.grid.sent)
    for case.make in (own,) if planned else (own, plain):
        with pytest.raises(CheckpointError, match=r"can't be resumed: its strategy has a custom loop.*needs another folder"):
            case.start()
    assert not any(asks_to_train(message) for message in case.grid.sent[sent:])


def test_resume_needs_a_folder():
    case = stock_case(Path())
    with pytest.raises(ValueError, match="resume=True: needs checkpoint_dir"):
        case.make().start(case.grid, arrays(), resume=True)
