"""Client canaries: clients with a random update as long as the clip allows, for methods that protect clients.

A canary replaces a client of the population, so that sampling rates and claim are those of the run without the canary.
Directions as in Andrew et al. 2023, "One-shot empirical privacy estimation for federated learning".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_dp.clients import DPClient
from flower_dp.clients.answering import NodeWork
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.reply.pipeline import ClientJob, Train, Trained
from flower_dp.core import checks
from flower_dp.core.clipping import clip_l2
from flower_dp.wire import Instruction

# Length of an update in clip norms: the real clip shortens it to a canary.
_BEFORE_THE_CLIP = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCanaries:
    """Canaries by the names of the clients that they replace.

    Attributes:
        names: names of these clients [m].
        directions: unit vectors [m, d], float32.
        contributions: contribution of every canary to this run [m]: 1, -1, or 0 for an absent client, which never replies.
    """

    names: tuple[str, ...]
    directions: np.ndarray
    contributions: np.ndarray

    @classmethod
    def drawn(
        cls, population: Sequence[str], choices: np.ndarray, *, relation: str, dimension: int, rng: np.random.Generator
    ) -> "ClientCanaries":
        """Draw places and directions.

        The two values of a coin are neighbors under `relation`. Add-or-remove-one: the canary or no client; the sum changes by
        the clip norm. Replace-one: the canary or its negative; the sum changes by twice the clip norm, the claim's whole
        sensitivity.

        Args:
            population: names of all clients.
            choices: coins [m], +1 or -1.
            relation: neighboring relation of the claim.
            dimension: size of an update.
            rng: generator, not that of the run's noise.

        Raises:
            ValueError: if there are fewer clients than coins.
        """
        if len(choices) > len(population):
            raise checks.bad("num_canaries", len(choices), f"at most num-clients={len(population)}")
        places = rng.permutation(len(population))[: len(choices)]
        directions = rng.integers(0, 2, (len(choices), dimension), dtype=np.int8).astype(np.float32) * 2 - 1
        directions /= np.float32(np.sqrt(dimension))
        names, both = tuple(population[place] for place in places), relation == "replace-one"
        return cls(names=names, directions=directions, contributions=choices if both else (choices + 1) // 2)

    def updates(self, clip_norm: float) -> dict[str, np.ndarray | None]:
        """Return every canary's update [d] before the clip; None for an absent canary."""
        length = _BEFORE_THE_CLIP * clip_norm
        return {
            name: (length * sign * direction).astype(np.float32) if sign else None
            for name, sign, direction in zip(self.names, self.contributions, self.directions, strict=True)
        }

    def score(
        self, models: Sequence[np.ndarray], *, others: Sequence[np.ndarray | float], scales: Sequence[float], sampling_rate: float
    ) -> np.ndarray:
        """Return the log-likelihood ratio [m] of the first value of every coin, given all released models.

        In a round, a canary's inner product with the model's change, divided by `scale`, is its contribution with probability
        `sampling_rate`, else 0, plus noise that is about Gaussian. The noise's standard deviation is estimated over the canaries,
        most of which contribute 0.

        Args:
            models: initial model and the model of every round [d].
            others: sum of all other clients' updates in every round [d], divided by the clip norm; 0.0 if unknown.
            scales: change of the model per contribution, by round: clip norm / expected cohort size.
            sampling_rate: probability that a client takes part in a round.
        """
        paired = bool((self.contributions < 0).any())
        total = np.zeros(len(self.names))
        for before, after, known, scale in zip(models[:-1], models[1:], others, scales, strict=True):
            change = (after - before).astype(np.float64) / scale
            change -= np.where(
                change == 0, 0.0, known
            )  # a coordinate that a mask or a selection has dropped has nothing of the others either
            seen = self.directions @ change
            seen -= np.median(seen) if sampling_rate < 0.5 else 0.0
            variance = max(1.4826 * float(np.median(np.abs(seen))), 1e-3) ** 2
            total += _mixture(seen, variance, sampling_rate)
            total -= _mixture(-seen, variance, sampling_rate) if paired else 0.0
        return total


def _mixture(seen: np.ndarray, variance: float, rate: float) -> np.ndarray:
    """Return log((1 - rate) + rate exp((seen - 1/2) / variance)): a contribution of 1 with this rate, against 0."""
    exponent = (seen - 0.5) / variance
    if rate >= 1:
        return exponent
    ratio: np.ndarray = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    return ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryUpdates:
    """Local training with given rows for some clients; from the clip on, everything is the method's own.

    Attributes:
        train: training of all other clients.
        given: rows [d] by client; None for no reply. Entries that the pipeline appends to a row are 0 before the clip.
        length: length of a row.
        see: function called with the row [length] of every other client.
    """

    train: Train
    given: Mapping[str, np.ndarray | None]
    length: int
    see: Callable[[Tensor], None]

    def rows(self, vector: Tensor, jobs: Sequence[ClientJob]) -> Iterator[Trained]:
        """Yield every client's row [length] and training loss, or its error, in order."""
        trained = iter(self.train.rows(vector, [job for job in jobs if job.name not in self.given]))
        for job in jobs:
            if job.name not in self.given:
                result = next(trained)
                if not isinstance(result, Exception):
                    self.see(result[0])
                yield result
            elif (update := self.given[job.name]) is None:
                yield Declined("this canary is absent")
            else:
                row = torch.zeros(self.length, dtype=vector.dtype, device=vector.device)
                row[: vector.numel()] = torch.from_numpy(update).to(vector.device)
                yield row, torch.zeros((), device=vector.device)


class CanaryClient(DPClient):
    """A client of client-level methods that hosts canaries among its clients.

    Attributes:
        others: sum of the clipped updates of all clients that are not canaries, by round [d].

    Args:
        like: real client, whose recipe, policy and engine are used.
        canaries: updates of canaries before the clip, by name; None for no reply.
    """

    def __init__(self, like: DPClient, canaries: Mapping[str, np.ndarray | None]) -> None:
        names = ("clients", "training", "policy", "seed", "training_engine", "group_size", "metrics")
        arguments = {name: getattr(like, name) for name in names}
        super().__init__(model=like.model.module, device=like.model.device, **arguments)
        self._canaries = dict(canaries)
        self.others: dict[int, np.ndarray] = {}

    def _work(self, vector: Tensor, instruction: Instruction) -> NodeWork:
        work = super()._work(vector, instruction)
        ask = instruction.ask
        if ask.metrics is not None:
            return work
        length, dimension = ask.row_length(vector.numel()), vector.numel()
        total = self.others.setdefault(instruction.server_round, np.zeros(dimension))

        def see(row: Tensor) -> None:
            total[:] += clip_l2(row[:dimension], ask.promise.clip_norm).cpu().numpy()

        def planted(pipeline: Any) -> Any:
            return replace(pipeline, train=CanaryUpdates(train=pipeline.train, given=self._canaries, length=length, see=see))

        return replace(work, groups=[(planted(pipeline), jobs) for pipeline, jobs in work.groups])
