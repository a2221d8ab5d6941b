"""A run of a method of the contract suite: a model, records, an app and a grid.

Workers of Ray import this file with the app. It needs neither pytest nor an accountant, whose imports take seconds.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import load
from torch import nn

from flower_dp.clients import TensorRecords, client_app, model_arrays
from flower_dp.strategies import DPStrategy
from tests.charges import Kept, assert_charges_are_the_ledgers
from tests.contracts import METHODS, NUM_RECORDS, Method, Words
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import linear, records
from tests.stock import shifted, stock_app

FEATURES, CLASSES = 3_000, 2
SIZE = FEATURES * CLASSES
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model, the records of each client, what a stock client adds to the model, and further arguments of this package's clients."""

    model: Callable[[], nn.Module]
    data: Callable[[str], TensorRecords]
    shift: Callable[[int], float]
    node: Mapping[str, Any] = field(default_factory=dict)


def still_model() -> nn.Module:
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    return model


def still_data(name: str) -> TensorRecords:
    return TensorRecords(inputs=torch.zeros(NUM_RECORDS, FEATURES), targets=torch.zeros(NUM_RECORDS, dtype=torch.int64))


SMALL = Problem(model=linear, data=lambda name: records(name, NUM_RECORDS), shift=lambda node: 0.02 * node)
# Inputs of zero: every gradient is zero, and so is every update. Weights of zero stay zero when they are clipped.
STILL = Problem(model=still_model, data=still_data, shift=lambda node: 0.0)


class WatchedGrid(LocalGrid):
    """Calls `watch` before the messages of each round leave."""

    watch: Callable[[], None] | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if self.watch and any(asks_to_train(message) for message in messages):
            self.watch()
        return super().send_and_receive(messages, timeout=timeout)

    @property
    def train_messages(self) -> list[Message]:
        return [message for message in self.sent if message.metadata.message_type == "train"]


def app_of(method: Method, arguments: Words, problem: Problem, *, num_nodes: int, noise_seed: int | None = None) -> ClientApp:
    """An app whose nodes host the clients in turn, and make their client anew for every message, as Flower does."""
    if method.client is None:
        return stock_app(shifted(problem.shift))
    names = [f"c{index}" for index in range(arguments.num_clients)]

    def client_fn(context: Context) -> Any:
        part = int(context.node_config["partition-id"])
        hosted = {name: problem.data(name) for name in names[part::num_nodes]}
        return method.client(arguments, model=problem.model(), clients=hosted, noise_seed=noise_seed, **problem.node)

    return client_app(client_fn)


def grid_of(
    method: Method,
    arguments: Words,
    problem: Problem = SMALL,
    *,
    num_nodes: int | None = None,
    noise_seed: int | None = None,
    tamper: Any = None,
) -> WatchedGrid:
    nodes = num_nodes or arguments.num_clients
    return WatchedGrid(app_of(method, arguments, problem, num_nodes=nodes, noise_seed=noise_seed), nodes, tamper=tamper)


@dataclass(slots=True)
class Run:
    """A strategy that has run, and the model before the first round and after each, as vectors.

    A still run has its log as well, and how many rounds were charged when the messages of each round left.
    """

    strategy: DPStrategy
    grid: WatchedGrid
    models: list[np.ndarray] = field(default_factory=list)
    log: str = ""
    seen: list[int] = field(default_factory=list)

    @property
    def bits(self) -> list[bytes]:
        return [model.tobytes() for model in self.models]


def start(strategy: DPStrategy, grid: WatchedGrid, arguments: Words, problem: Problem = SMALL) -> Run:
    run = Run(strategy, grid)

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        run.models.append(np.concatenate([array.numpy().ravel() for array in arrays.values()]))

    strategy._session.log, strategy._session.finished = (kept := Kept()), {}
    strategy.start(grid, model_arrays(problem.model()), num_rounds=arguments.num_rounds, evaluate_fn=keep)
    assert_charges_are_the_ledgers(strategy, kept)
    return run


def run_of(method: Method, arguments: Words = Words(), problem: Problem = SMALL, **clients: Any) -> Run:  # noqa: B008
    return start(method.strategy(arguments), grid_of(method, arguments, problem, **clients), arguments, problem)


def evaluating_stock_app() -> ClientApp:
    app = stock_app(shifted(lambda node: 0.0))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}), reply_to=message)

    return app


def seeded_run(label: str) -> Run:
    """Run a method in this process with fixed noise on two nodes, as the app `tests/foreign/seeded` does."""
    (method,) = [method for method in METHODS if method.label == label]
    return run_of(method, Words(noise_seed=SEED), num_nodes=2, noise_seed=SEED)


def assert_left_by(run: Run, folder: Path) -> None:
    """A run folder has the model, the statement and the rounds of a run in this process."""
    (weights,) = load((folder / "model.safetensors").read_bytes()).values()
    assert weights.tobytes() == run.bits[-1]
    assert (folder / "statement.txt").read_text() == f"{run.strategy.statement}\n"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rows[1:]] == [report.replies for report in run.strategy.rounds]
