"""One case of an audit: a strategy and its clients, two neighboring inputs, and an adversary's view of a run."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp

from flower_dp import wire
from flower_dp.audit import worst_case
from flower_dp.clients import client_app, model_arrays
from flower_dp.clients.node_client import HostingClient
from flower_dp.core import checks, compression
from flower_dp.privacy.charges import History
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.simulation.local_grid import LocalGrid, Sent
from flower_dp.strategies import DPStrategy
from flower_dp.strategies.releases.noised_sum import NoisedSum
from flower_dp.wire import Indicator, Instruction

VIEWS = ("outsider", "participant", "server")
# The node of the client whose part in the run must be hidden, and the node of the participant that knows its own message.
_UNIT, _PARTICIPANT = 2, 3
_NO_BITS = 2000.0
_LARGEST_ARRAY = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Neighboring inputs of one method.

    Every client has its own node. Client 0 is the unit, or holds the record that is. In odd rounds client i pushes the parameters
    in direction `present[i]` with the unit, and in direction `absent[i]` without it; in even rounds it pushes the other way.
    Composition lets the adversary choose the second question by the first answer, and noise that is drawn only once cancels in
    the difference of two rounds.

    Attributes:
        label: unique label of the case.
        method: name of the method on the wire.
        strategy: function that makes the strategy.
        client: function of a node's `model` and `clients` that makes its client; None for a stock client of Flower.
        present: push of every client with the unit: -1, 0 or 1.
        absent: push of every client in the neighboring input.
        drops_out: whether client 0 does not reply at all in the neighboring input; else it replies with another push.
        view: adversary's view. `outsider`: global models. `participant`: global models, without client 1's own messages, which
            it knows. `server`: client 0's messages.
        num_rounds: number of rounds of a run.
        num_records: number of records of a client.
        inputs: 1.0 pushes both parameters, 0.0 one of them.
        separated: whether clients keep a minimum separation. The unit is then the client that is asked first, and pushes in one
            direction whenever it is asked; the statistics weigh rounds by the covariance of their noise, and alike.
        post_processed: whether the view is a lossy function of the noised release, so that its trade-off curve is not that of
            the noise.

    Raises:
        ValueError: naming an invalid field and its value.
    """

    label: str
    method: str
    strategy: Callable[[], DPStrategy]
    client: Callable[..., HostingClient] | None
    present: tuple[float, ...]
    absent: tuple[float, ...]
    drops_out: bool = False
    view: str = "outsider"
    num_rounds: int = 1
    num_records: int = 1
    inputs: float = 1.0
    separated: bool = False
    post_processed: bool = False

    def __post_init__(self) -> None:
        checks.one_of("view", self.view, VIEWS)
        checks.integer("num_rounds", self.num_rounds, at_least=1)
        if len(self.present) != len(self.absent) or not self.present:
            raise ValueError(f"absent={self.absent!r}: must have a push for each of {len(self.present)} clients")
        if self.view == "participant" and len(self.present) < 2:
            raise ValueError("view='participant': needs a second client; give two pushes or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Count:
    """The noised sum of a round's indicators, in units of the update, and the request for these indicators."""

    total: float
    asked: Indicator


class TrialRunner:
    """The runs of one case, with real clients, messages and server.

    The strategy is made once. Every run begins from the strategy's state before the first run. Nothing is seeded.

    Args:
        case: case to run.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.strategy = case, case.strategy()
        if self.strategy.seeded_noise:
            raise ValueError(
                f"{case.label}: draws its noise from a fixed seed, so all trials would be the same; leave out the seed"
            )
        self._pushes: Sequence[float] = case.present  # of the clients, in the current round
        self._grid = LocalGrid(self._app(case.client), len(case.present))
        self._arrays = model_arrays(worst_case.model())
        self.strategy.plan(case.num_rounds, tuple(f"c{place}" for place in range(len(case.present))))
        self._fresh = self.strategy.state

    def _app(self, client: Callable[..., HostingClient] | None) -> ClientApp:
        case = self.case
        records = cache(lambda push: worst_case.records(push, size=case.num_records, inputs=case.inputs))

        def push(context: Context) -> float:
            return self._pushes[int(context.node_config["partition-id"])]

        if client is None:
            return worst_case.stock_app(push)

        @cache
        def hosting(name: str, push: float) -> HostingClient:
            return client(model=worst_case.model(), clients={name: records(push)})

        return client_app(lambda context: hosting(f"c{context.node_config['partition-id']}", push(context)))

    def run(self, *, present: bool) -> dict[str, float]:
        """Run once, with the unit or without it, and return the value of every statistic."""
        case, strategy, grid = self.case, self.strategy, self._grid
        strategy.state, arrays = self._fresh, self._arrays
        grid.forget()
        grid.silent = frozenset({_UNIT}) if case.drops_out and not present else frozenset()
        seen, counts, pattern = [], [], list[float]()
        unit = 0
        for server_round in range(1, case.num_rounds + 1):
            sign = 1.0 if server_round % 2 or case.separated else -1.0
            self._pushes = [sign * push + 0.0 for push in (case.present if present else case.absent)]
            grid.exchanged.clear()
            messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), grid))
            if case.separated:
                cohort = [message.metadata.dst_node_id - _UNIT for message in messages]
                unit = unit if pattern else cohort[0]
                self._pushes = [*self._pushes[-unit:], *self._pushes[:-unit]] if unit else self._pushes
                pattern.append(float(unit in cohort))
            before, asked = arrays, _indicator(strategy)
            released, _ = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
            arrays = before if released is None else released
            seen.append([sign * part for part in self._view_of_round(before, arrays)])
            if asked is not None:
                counts.append(self._beside(asked))
        parts = [np.stack(rounds) for rounds in zip(*seen, strict=True)]
        weights = self._weights(tuple(pattern)) if case.separated else np.ones(case.num_rounds)
        named = _statistics(parts, worst_case.direction(case.inputs), counts, weights)
        if case.separated:
            along = parts[0] @ worst_case.direction(case.inputs)
            named |= {"sum": float(along @ pattern), "difference": float(along[:-1] @ pattern[:-1] - along[1:] @ pattern[:-1])}
        return named

    def _weights(self, pattern: tuple[float, ...]) -> np.ndarray:
        """Return the weights of rounds that tell most of a unit with this pattern: S^-1 pattern, with the covariance S."""
        rules: Any = self.strategy.rules
        draw, made, buffers = iter(np.eye(4 * len(pattern))), list[np.ndarray](), ()
        for number in range(1, len(pattern) + 1):
            row, buffers = rules.training.noise.matrix.row(number, buffers, lambda: next(draw).copy())
            made.append(row)
        return np.asarray(np.linalg.solve(np.array(made) @ np.array(made).T, np.array(pattern)))

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement of the last run."""
        return self.strategy.statement

    @property
    def ledger(self) -> History:
        """The charges of the last run to client 0, against the adversary with the largest view."""
        rules: Any = self.strategy.rules
        return self.strategy.charges.history(rules.training.scope, "c0", release=rules.training.name)

    def _view_of_round(self, before: ArrayRecord, after: ArrayRecord) -> list[np.ndarray]:
        """Return the adversary's view of a round [d]; for a participant, also the view without its own noise."""
        if self.case.view == "server":
            return [self._sent_by(_UNIT)]
        rules: Any = self.strategy.rules
        moved = (_vector(after) - _vector(before)) * rules.training.sampling.expected_cohort_size(len(self.case.present))
        if self.case.view == "outsider":
            return [moved]
        own = self._sent_by(_PARTICIPANT)[: len(moved)]
        return [moved - own, moved - len(self.case.present) * own]

    def _beside(self, asked: Indicator) -> _Count:
        """Return the noised sum of a round's indicators, computed from the next clip norm, which is public."""
        rules: Any = self.strategy.rules
        clip = rules.training.clip.of
        within = clip.target_quantile - math.log(rules.clip_norm(self.strategy.state) / asked.clip_norm) / clip.learning_rate
        total = (within - 0.5) * asked.scale * rules.training.sampling.expected_cohort_size(len(self.case.present))
        if self.case.view == "participant":
            total -= float(self._sent_by(_PARTICIPANT)[-1])
        return _Count(total=total, asked=asked)

    def _sent_by(self, node: int) -> np.ndarray:
        """Return a node's row, or zeros if it sent none."""
        sent = self._grid.exchanged.get(node)
        return np.zeros(2) if sent is None else row_of(sent)[1]


@contextmanager
def quiet(least: int = logging.CRITICAL) -> Iterator[None]:
    """Suppress log lines of runs below the level `least`."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)


def _statistics(
    parts: list[np.ndarray], direction: np.ndarray, counts: Sequence[_Count], weights: np.ndarray
) -> dict[str, float]:
    """Return every statistic of the views [rounds, d]; each one exposes another kind of bug.

    `projection` is the log likelihood ratio of Gaussian noise, up to a factor and a constant: the weighted sum of the views over
    rounds, in the direction of the unit's push. With an adaptive clip norm it covers update and indicator together: one noise
    hides both. `shared noise` is the projection minus a participant's own noise times the number of clients: if all clients drew
    the same noise, no noise is left. `update` and `indicator` are the two parts of the projection: each exposes noise that is too
    small on that part alone. `lowest bit` is the exponent of the lowest bit that is set in any coordinate: noise on a lattice
    leaves nothing below its step, whatever the unit's value is.
    """
    along = [part @ direction * weights for part in parts]
    named = {"projection": float(along[0].sum()), "lowest bit": _lowest_bit(parts[0])}
    if len(parts) > 1:
        named["shared noise"] = float(along[1].sum())
    if counts:
        asked = [count.asked for count in counts]
        # The unit's row is the clip norm long, in this direction, and its update was longer: its indicator is -scale / 2.
        scales = np.array([each.clip_norm / (np.linalg.norm(direction) * each.joint_norm**2) for each in asked])
        named["update"] = float((along[0] * scales).sum())
        named["indicator"] = -sum(count.total * count.asked.scale / (2 * count.asked.joint_norm**2) for count in counts)
        named["projection"] = named["update"] + named["indicator"]
    return named


def _indicator(strategy: DPStrategy) -> Indicator | None:
    """Return the indicator that the next round requests beside the update; None if it requests none."""
    rules: Any = strategy.rules
    training = rules.releases[0]
    return training.indicator(training.state_in(strategy.state)) if isinstance(training, NoisedSum) else None


def _lowest_bit(values: np.ndarray) -> float:
    ratios = [float(value).as_integer_ratio() for value in values.ravel() if value]
    lowest = [(top & -top).bit_length() - bottom.bit_length() for top, bottom in ratios]
    return float(min(lowest, default=_NO_BITS))


def _vector(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().ravel().astype(np.float64) for array in arrays.values()])


def row_of(sent: Sent) -> tuple[Instruction, np.ndarray]:
    """Return a node's instruction, and the row of its reply, as the server reads it.

    Raises:
        RuntimeError: if the reply has no row.
    """
    if sent.reply.has_error():
        raise RuntimeError(f"a client of the audit does not reply: {sent.reply.error.reason}")
    config = next(record for record in sent.message.content.config_records.values() if wire.KEY in record)
    arrays = wire.numpy_arrays(wire.arrays_of(sent.message.content), limit=_LARGEST_ARRAY)
    instruction = wire.instruction_of(config, list(arrays.values()))
    answer = wire.answer_of(sent.reply.content, instruction.clients)
    if answer is None or answer.refused:
        raise RuntimeError(f"a client of the audit does not reply: {'no answer' if answer is None else answer.refused}")
    size = sum(array.size for array in arrays.values()) - sum(len(one) for one in instruction.ask.vectors.values())
    length = instruction.ask.row_length(size)
    mask = None if instruction.ask.mask is None else instruction.ask.mask.indices(size)
    payload = wire.payload_of(wire.arrays_of(sent.reply.content), answer.payload, length)
    return instruction, np.asarray(compression.decode(payload, length, mask=mask), np.float64)
