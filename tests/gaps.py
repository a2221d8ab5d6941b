"""Generated runs with gaps: unequal clients, several a node, replies that get lost, nodes that are away, and a resume in the middle."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from hypothesis import Phase, assume, settings
from hypothesis import strategies as st

from flower_dp import wire
from flower_dp.clients import TensorRecords, client_app, model_arrays
from flower_dp.strategies import DPStrategy
from tests.grids import LocalGrid, asks_to_train
from tests.local_grids import CLASSES, FEATURES, linear


def quickly(max_examples: int) -> Any:
    """So many examples, and the first that fails as it is: each is a run, and to find a smaller one takes hundreds."""
    return settings(max_examples=max_examples, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)


ROUNDS = 4
Nodes = tuple[frozenset[int], ...]


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Who is there in a run.

    Attributes:
        sizes: records of each client.
        nodes: how many host them, in turn.
        lost: nodes whose replies get lost, by round.
        away: nodes that are not reached at all, by round.
        dies: the round in which the server is killed, and after which it goes on; 0: never.
        unsent: whether it is killed before the messages of that round leave, and not when the round is over.
    """

    sizes: tuple[int, ...]
    nodes: int
    lost: Nodes
    away: Nodes
    dies: int
    unsent: bool

    @property
    def names(self) -> list[str]:
        return [f"c{number}" for number in range(len(self.sizes))]

    def node_of(self, client: int) -> int:
        return client % self.nodes + 1

    @property
    def unfinished(self) -> int:
        """The round that was charged and asked nobody; 0 for none."""
        return self.dies if self.unsent else 0

    def reached(self, client: int, server_round: int) -> bool:
        return server_round != self.unfinished and self.node_of(client) not in self.away[server_round - 1]

    def heard(self, client: int, server_round: int) -> bool:
        return self.reached(client, server_round) and self.node_of(client) not in self.lost[server_round - 1]


@st.composite
def gaps(draw: Any, *, sizes: tuple[int, int] = (4, 9)) -> Gaps:
    found = tuple(draw(st.lists(st.integers(*sizes), min_size=3, max_size=4)))
    nodes = draw(st.integers(2, len(found)))
    # In round 1 somebody answers: a run in which nobody does is ended.
    lost, away = (
        draw(st.tuples(*(st.frozensets(st.integers(1, nodes), max_size=one) for one in most)))
        for most in ((1, 2, 1, 2), (0, 1, 2, 1))
    )
    dies = draw(st.sampled_from([2, 1, 3, 0]))
    unsent = dies > 1 and draw(st.booleans())  # before the first checkpoint there is nothing to go on with
    made = Gaps(sizes=found, nodes=nodes, lost=lost, away=away, dies=dies, unsent=unsent)
    # A run in which nobody answers for three rounds in a row is ended, too.
    assume(any(made.heard(client, server_round) for client in range(len(found)) for server_round in (2, 3, 4)))
    return made


class Killed(BaseException):
    """The server's process has ended."""


class GappyGrid(LocalGrid):
    """A grid with these gaps, in training and in evaluations alike."""

    gaps: Gaps
    unsent: Sequence[Message] = ()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        of_rounds = [one for one in messages if asks_to_train(one) or one.metadata.message_type == "evaluate"]
        if not of_rounds:
            return super().send_and_receive(messages, timeout=timeout)
        number = int(of_rounds[0].metadata.group_id) - 1
        if number + 1 == self.gaps.unfinished and of_rounds[0].metadata.message_type == "train":
            self.unsent = of_rounds
            raise Killed
        away, lost = self.gaps.away[number], self.gaps.lost[number]
        reached = [one for one in of_rounds if one.metadata.dst_node_id not in away]
        self.sent += [one for one in of_rounds if one not in reached]
        replies = super().send_and_receive(reached, timeout=timeout)
        return [reply for reply in replies if reply.metadata.src_node_id not in lost]

    def asked(self, kind: str) -> dict[int, list[str]]:
        """Who was asked to train, or to evaluate, by round."""
        found: dict[int, list[str]] = {}
        for message in [*self.sent, *self.unsent]:
            if message.metadata.message_type == kind:
                config = next(one for one in message.content.config_records.values() if wire.KEY in one)
                clients = wire.Instruction.from_json(str(config[wire.KEY])).clients
                found.setdefault(int(message.metadata.group_id), []).extend(clients)
        return {server_round: sorted(names) for server_round, names in found.items()}


def record(client: int) -> tuple[np.ndarray, int]:
    """Of which all records of a client are copies: a batch is the same whichever of them are in it."""
    rng = np.random.default_rng(client + 40)
    return rng.normal(size=FEATURES) * (client + 1), client % CLASSES


@dataclass
class GappyRun:
    """The model after each finished round, the grid, and the strategies: the one that was killed, if so, and the one that went on."""

    grid: GappyGrid
    strategies: list[DPStrategy] = field(default_factory=list)
    models: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def strategy(self) -> Any:
        return self.strategies[-1]

    def assert_unfinished_are_told(self, last: int = ROUNDS) -> None:
        """Both strategies say which round up to the last was charged and not finished, and of no other that it was."""
        gaps = self.grid.gaps
        told = [f"round {gaps.unfinished} was charged and not finished"] if 0 < gaps.unfinished <= last else []
        for strategy in self.strategies:
            assert [one for one in strategy.statement.incidents if "not finished" in one] == told


def run(gaps: Gaps, strategy: Callable[[], DPStrategy], client: Callable[..., Any], folder: Path) -> GappyRun:
    """Run with these gaps: `client` makes a node's client of model, clients and device."""

    def client_fn(context: Context) -> Any:
        clients = {}
        for number in range(int(context.node_config["partition-id"]), len(gaps.sizes), gaps.nodes):
            inputs, target = record(number)
            rows = torch.tensor(inputs, dtype=torch.float32).repeat(gaps.sizes[number], 1)
            clients[gaps.names[number]] = TensorRecords(inputs=rows, targets=torch.full((gaps.sizes[number],), target))
        return client(model=linear(), clients=clients, device="cpu")

    found = GappyRun(GappyGrid(client_app(client_fn), gaps.nodes))
    found.grid.gaps = gaps
    dies = {gaps.dies} - {gaps.unfinished, 0}

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        found.models[server_round] = np.concatenate([one.numpy().ravel() for one in arrays.values()]).astype(np.float64)
        if server_round in dies:
            dies.clear()
            raise Killed

    for resume in (False, True)[: 2 if gaps.dies else 1]:
        found.strategies.append(strategy())
        place = {"checkpoint_dir": folder, "resume": resume} if gaps.dies else {}
        with suppress(Killed):
            found.strategies[-1].start(found.grid, model_arrays(linear()), num_rounds=ROUNDS, evaluate_fn=keep, **place)
    return found
