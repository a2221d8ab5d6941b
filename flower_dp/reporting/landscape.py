"""The loss around final models, along random directions that are normalized filter by filter.

Li, Xu, Taylor, Studer, Goldstein 2018, *Visualizing the Loss Landscape of Neural Nets*, section 4: L(theta + a delta + b eta).
Every filter of a random Gaussian direction is scaled to the norm of the same filter of theta. Biases do not change.
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
    """The public test of a run's final model.

    Attributes:
        module: model of the run's architecture, with any weights.
        loss: function (model outputs, targets) -> mean loss of a batch.
        records: public test records.
    """

    module: nn.Module
    loss: Loss
    records: Records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landscape:
    """The mean test loss around one final model.

    Attributes:
        label: label that tells the run from the others.
        epsilon: the statement's epsilon of the run; infinite if not private.
        num_records: number of test records.
        offsets: increasing offsets [r]; the middle one is 0.
        losses: losses [r, r]; row i and column j belong to model + offsets[j] x first + offsets[i] x second direction.
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
    """Return the loss around the final models of runs of flower-dp's own app, or of apps that name a `public-test`.

    All runs share one Gaussian draw per direction, and the same test records. Each model scales the draw by its own filters, as
    in the paper. So losses of models with weights of different size can be compared.

    Args:
        runs: runs of one task and model.
        resolution: points per direction, odd and >= 3, so that the model itself is a point.
        distance: distance on both sides along a direction, > 0; 1: until every filter has moved by its own norm.
        num_records: number of test records, drawn at random; all records if there are fewer.
        seed: seed of directions and records.

    Raises:
        ValueError: naming an invalid argument; or the folder of a run without a final model or a known test, or with another
            model or other test records than the first run.
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
    results: list[Landscape] = []
    first: _Problem | None = None
    for run, label, arrays, test in zip(runs, _labels(runs), models, tests, strict=True):
        try:
            problem = _Problem.of(test, arrays, num_records, seed)
            problem.check_alike(first or problem)
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from None
        first = first or problem
        losses = problem.losses([_direction(problem.model.layout, arrays, (seed, axis)) for axis in (0, 1)], offsets)
        results.append(
            Landscape(label=label, epsilon=run.epsilon, num_records=problem.num_records, offsets=offsets, losses=losses)
        )
    return results


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
        """Refuse a problem that can't share directions and records with another problem."""
        if self.model.layout != other.model.layout:
            raise ValueError("has another model than the first run, so they can't share directions; leave it out")
        mine, theirs = ([tensor for batch in problem.batches for tensor in batch] for problem in (self, other))
        if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
            raise ValueError("has other test records than the first run, so losses can't be compared; leave it out")

    @torch.no_grad()
    def losses(self, directions: Sequence[NDArray[np.float32]], offsets: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss [r, r] at all points of the plane of two directions [d]."""
        first, second = map(torch.from_numpy, directions)
        losses = np.empty((len(offsets), len(offsets)))
        for row, up in enumerate(offsets):
            for column, along in enumerate(offsets):
                self.model.vector.copy_(self.center + float(along) * first + float(up) * second)
                losses[row, column] = sum(
                    float(self.loss(outputs_of(self.model.module, inputs), targets)) * len(targets)
                    for inputs, targets in self.batches
                )
        return losses / self.num_records


def _direction(layout: Layout, arrays: Mapping[str, NDArray[np.generic]], seed: tuple[int, int]) -> NDArray[np.float32]:
    """Return a random direction [d], float32, scaled filter by filter to a model's arrays."""
    drawn = np.random.default_rng(seed).standard_normal(layout.size, dtype=np.float32)
    scaled = {name: _scaled(part, arrays[name]) for name, part in layout.unflatten(drawn).items()}
    direction: NDArray[np.float32] = layout.flatten(scaled)
    return direction


def _scaled(drawn: NDArray[np.float32], weights: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return a draw with every filter (along the first axis) scaled to the norm of the weights' filter; zeros for biases."""
    if weights.ndim < 2:
        return np.zeros_like(drawn)
    rows, filters = drawn.reshape(len(drawn), -1), weights.reshape(len(weights), -1)
    factors = np.linalg.norm(filters, axis=1) / np.linalg.norm(rows, axis=1)
    scaled: NDArray[np.float32] = (factors[:, None] * rows).reshape(drawn.shape).astype(np.float32)
    return scaled


def _labels(runs: Sequence[RunContents]) -> list[str]:
    """Return labels that tell the runs apart: the settings in which runs differ, or else the folders' names."""
    labels = labels_of([run.config for run in runs])
    return labels if len(set(labels)) == len(labels) else [run.folder.resolve().name for run in runs]


def _app_of(run: RunContents) -> apps.App:
    own = apps.own_app()
    if not (odd := sorted(own.defaults.keys() ^ run.config.keys())):
        return own
    difference = f"has no {odd[0]}" if odd[0] in own.defaults else f"has {odd[0]}"
    no_task = f"{run.folder}: is not a run of a task of this flower-dp (its run-config.toml {difference}), "
    try:
        app = LaunchRecord.read(run.folder).target.app
    except ValueError as error:
        raise ValueError(f"{no_task}nor of a known app: {error}") from None
    if app.own or not app.public_test:
        raise ValueError(
            f'{no_task}and {app.name} names no public test; add public-test = "module:function" under [tool.flower-dp] '
            "of its pyproject.toml: the function takes the run's settings and returns flower_dp.reporting.landscape.PublicTest"
        )
    return app


def _public_test(run: RunContents) -> PublicTest:
    """Return the public test of a run, from flower-dp's own app or from the app of the run.

    Raises:
        ValueError: naming the folder, if its app names no test, or the app's data can't be read.
    """
    app = _app_of(run)
    with plugins.load_plugin(app, app.public_test) as public_test:
        try:
            return cast("PublicTest", public_test(run.config))
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from None
