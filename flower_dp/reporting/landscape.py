"""The loss around final models, along random directions that are normalized filter by filter.

Li, Xu, Taylor, Studer, Goldstein 2018, *Visualizing the Loss Landscape of Neural Nets*, section 4: L(theta + a delta + b eta).
Every filter of a random Gaussian direction is scaled to the norm of the same filter of theta, and biases stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_dp.clients.training.losses import Loss
from flower_dp.clients.training.recipe import FlatModel, outputs_of
from flower_dp.clients.training.records import Records
from flower_dp.core import checks
from flower_dp.core.vectors import Layout
from flower_dp.reporting.labels import labels_of
from flower_dp.reporting.past_run import RunContents, check_each_once
from flower_dp.running import apps, plugins
from flower_dp.running.launch_record import LaunchRecord

_BATCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTest:
    """What a run's final model is tested with.

    Attributes:
        module: the architecture, with any weights.
        loss: model outputs, targets -> the mean loss of a batch.
        records: public ones.
    """

    module: nn.Module
    loss: Loss
    records: Records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landscape:
    """The mean test loss around one final model.

    Attributes:
        label: what tells the run from the others.
        epsilon: the tight epsilon of the run; infinite: not private.
        offsets: [r], increasing; the middle one is 0.
        num_records: on how many test records.
        losses: [r, r]: row i and column j have the loss at the model + offsets[j] x first + offsets[i] x second direction.
    """

    label: str
    epsilon: float
    num_records: int
    offsets: NDArray[np.float64]
    losses: NDArray[np.float64]

    @property
    def line(self) -> NDArray[np.float64]:
        """The losses [r] along the first direction."""
        line: NDArray[np.float64] = self.losses[len(self.offsets) // 2]
        return line

    @property
    def here(self) -> float:
        """The loss of the model itself."""
        return float(self.line[len(self.offsets) // 2])


def landscapes(
    runs: Sequence[RunContents], *, resolution: int = 15, distance: float = 1.0, num_records: int = 200, seed: int = 0
) -> list[Landscape]:
    """Return the loss around the final models of some runs of flower-dp's own app, or of apps that name a `public-test`.

    All runs share one Gaussian draw a direction and are tested on the same records. Each model scales the draw by its own
    filters, as in the paper: the losses of models with weights of different size can then be compared.

    Args:
        runs: runs of one task and model.
        resolution: points a direction, odd, so that the model itself is one of them.
        distance: how far a direction is followed to both sides; 1: until every filter has moved by its own norm.
        num_records: how many test records, drawn at random; all of them where there are fewer.
        seed: of directions and records.

    Raises:
        ValueError: naming a value that makes no sense, or the folder of a run that has no final model, whose test is not known,
            or that has another model or other test records than the first.
    """
    if checks.integer("--resolution", resolution, at_least=3) % 2 == 0:
        raise checks.bad("--resolution", resolution, "odd, so that the model itself is a point")
    checks.number("--distance", distance, above=0)
    checks.integer("--records", num_records, at_least=1)
    checks.integer("--seed", seed, at_least=0)
    check_each_once(run.folder for run in runs)
    models = [run.model() for run in runs]
    tests = [_public_test(run) for run in runs]
    offsets = np.linspace(-distance, distance, resolution)
    found: list[Landscape] = []
    first: _Problem | None = None
    for run, label, arrays, test in zip(runs, _labels(runs), models, tests, strict=True):
        try:
            problem = _Problem.of(test, arrays, num_records, seed)
            problem.check_alike(first or problem)
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from None
        first = first or problem
        losses = problem.losses([_direction(problem.model.layout, arrays, (seed, axis)) for axis in (0, 1)], offsets)
        found.append(Landscape(label=label, epsilon=run.epsilon, num_records=problem.num_records, offsets=offsets, losses=losses))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """A final model [d], and the batches of test records on which its surroundings are evaluated."""

    model: FlatModel
    loss: Loss
    center: Tensor
    batches: list[tuple[Any, Tensor]]

    @classmethod
    def of(cls, test: PublicTest, arrays: Mapping[str, NDArray[np.generic]], num_records: int, seed: int) -> "_Problem":
        model = FlatModel(test.module)
        model.module.eval()
        center = torch.from_numpy(model.layout.flatten(arrays))
        drawn = np.random.default_rng((seed, 2)).permutation(len(test.records))[:num_records]
        positions = torch.split(torch.from_numpy(np.sort(drawn)), _BATCH)
        batches = [test.records.batch(part, model.device) for part in positions]
        return cls(model=model, loss=test.loss, center=center, batches=batches)

    @property
    def num_records(self) -> int:
        return sum(len(targets) for _, targets in self.batches)

    def check_alike(self, other: "_Problem") -> None:
        """Refuse a problem that can't share directions and records with another one."""
        if self.model.layout != other.model.layout:
            raise ValueError("has another model than the first run; directions can't be the same")
        mine, theirs = ([tensor for batch in one.batches for tensor in batch] for one in (self, other))
        if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
            raise ValueError("has other test records than the first run; losses can't be compared")

    @torch.no_grad()
    def losses(self, directions: Sequence[NDArray[np.float32]], offsets: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss [r, r] at all points of the plane of two directions [d]."""
        first, second = map(torch.from_numpy, directions)
        found = np.empty((len(offsets), len(offsets)))
        for row, up in enumerate(offsets):
            for column, along in enumerate(offsets):
                self.model.vector.copy_(self.center + float(along) * first + float(up) * second)
                found[row, column] = sum(
                    float(self.loss(outputs_of(self.model.module, inputs), targets)) * len(targets)
                    for inputs, targets in self.batches
                )
        return found / self.num_records


def _direction(layout: Layout, arrays: Mapping[str, NDArray[np.generic]], seed: tuple[int, int]) -> NDArray[np.float32]:
    """Return a random direction [d], float32, scaled filter by filter to a model's arrays."""
    drawn = np.random.default_rng(seed).standard_normal(layout.size, dtype=np.float32)
    scaled = {name: _scaled(part, arrays[name]) for name, part in layout.unflatten(drawn).items()}
    direction: NDArray[np.float32] = layout.flatten(scaled)
    return direction


def _scaled(drawn: NDArray[np.float32], weights: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return a draw whose every filter, along the first axis, has the norm of that of the weights; zeros for biases."""
    if weights.ndim < 2:
        return np.zeros_like(drawn)
    rows, own = drawn.reshape(len(drawn), -1), weights.reshape(len(weights), -1)
    factors = np.linalg.norm(own, axis=1) / np.linalg.norm(rows, axis=1)
    scaled: NDArray[np.float32] = (factors[:, None] * rows).reshape(drawn.shape).astype(np.float32)
    return scaled


def _labels(runs: Sequence[RunContents]) -> list[str]:
    """Return what tells the runs from each other: settings in which they differ, or else their folders."""
    labels = labels_of([run.config for run in runs])
    return labels if len(set(labels)) == len(labels) else [run.folder.resolve().name for run in runs]


def _app_of(run: RunContents) -> apps.App:
    own = apps.own_app()
    if not (odd := sorted(own.defaults.keys() ^ run.config.keys())):
        return own
    what = f"has no {odd[0]}" if odd[0] in own.defaults else f"has {odd[0]}"
    no_task = f"{run.folder}: is not a run of a task of this flower-dp (its run-config.toml {what}), "
    try:
        app = LaunchRecord.read(run.folder).target.app
    except ValueError as error:
        raise ValueError(f"{no_task}nor of an app that is known: {error}") from None
    if app.own or not app.public_test:
        raise ValueError(
            f'{no_task}and {app.name} does not say what it is tested with: add public-test = "module:function" under '
            "[tool.flower-dp] of its pyproject.toml, which takes the run's settings and returns "
            "flower_dp.reporting.landscape.PublicTest"
        )
    return app


def _public_test(run: RunContents) -> PublicTest:
    """Return what a run is tested with, as flower-dp's own app says, or the app that `flower-dp run` has run.

    Raises:
        ValueError: naming the folder, if its app says nothing of it, or its data cannot be read.
    """
    app = _app_of(run)
    with plugins.load_plugin(app, app.public_test) as public_test:
        try:
            return cast("PublicTest", public_test(run.config))
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from None
