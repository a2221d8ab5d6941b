"""A release alone, without a run: what it asks, and what it makes of a sum."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from flower_dp.core.noise import Generator, noise_generator
from flower_dp.strategies.releases.noised_sum import NoisedSum, SumState
from flower_dp.strategies.releases.release import RoundRequest
from flower_dp.strategies.releases.replies import CollectedReplies
from flower_dp.strategies.run_state import RunState
from flower_dp.wire import Model, ReleaseRequest


def with_run_id(release: Any, state: Any = None) -> RunState:
    """The state of a run in which this release has this state; None for its first."""
    return RunState() if state is None else RunState().with_release(release.name, state)


def ask(release: Any, size: int, names: tuple[str, ...], state: Any = None) -> ReleaseRequest:
    """What a release asks for updates of this size."""
    asked: ReleaseRequest = release.ask(with_run_id(release, state), size, names, noise_generator())[0]
    return asked


def round_of(asked: ReleaseRequest, size: int, names: tuple[str, ...] = ()) -> RoundRequest:
    """The round in which this was asked of clients of one node."""
    model = Model.of(ArrayRecord({"w": Array(np.zeros(size, np.float32))}), frozen=())
    length = asked.row_length(size)
    return RoundRequest(
        server_round=1, method="dp-fedavg", ask=asked, length=length, model=model, asked={1: names} if names else {}
    )


def noised(
    release: NoisedSum,
    asked: ReleaseRequest,
    total: np.ndarray,
    names: tuple[str, ...],
    *,
    state: Any = None,
    rng: Generator | None = None,
) -> tuple[np.ndarray, SumState]:
    """The noised mean of a sum of replies of all these clients, and the next state."""
    now = round_of(asked, total.size - release.num_beside, names)
    collected = CollectedReplies(total=total, clients=list(names))
    return release.noised(with_run_id(release, state), now, collected, rng or noise_generator())
