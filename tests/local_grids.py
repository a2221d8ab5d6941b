"""Small problems and grids for the tests of methods with local noise."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flower_dp.clients import DPClient, FlatModel, LocalDPClient, RecordMetrics, TensorRecords, Training, client_app, model_arrays
from flower_dp.clients.local.client import LocalRecipe
from flower_dp.clients.local.evaluation import RecordContributions
from flower_dp.clients.local.row import evaluation_pipeline
from flower_dp.clients.reply.pipeline import ClientJob, Pipeline, Refusal, Reply
from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.privacy.evaluation_budget import EvaluationBudget
from flower_dp.privacy.fedsgd_dpc import gradient_terms
from flower_dp.privacy.release import Release
from tests.grids import LocalGrid

FEATURES, CLASSES = 6, 3
NAMES = [f"c{index}" for index in range(12)]


def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(nn.Linear(FEATURES, CLASSES, bias=False))


class Direct(nn.Module):
    """A model whose update after one step of size 1 is the mean of a client's records."""

    def __init__(self, start: np.ndarray | int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(start) if isinstance(start, int) else torch.from_numpy(start.copy()))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * inputs).sum(-1)


TRAINING = Training(learning_rate=1.0, batch_size=10**6, loss=lambda outputs, targets: -outputs.mean())


def records(name: str, size: int = 8, scale: float = 1.0) -> TensorRecords:
    rng = torch.Generator().manual_seed(NAMES.index(name) + 100)
    inputs = scale * torch.randn(size, FEATURES, generator=rng)
    return TensorRecords(inputs=inputs, targets=torch.randint(CLASSES, (size,), generator=rng))


def grid_of(
    recipe: LocalRecipe,
    data: dict[str, TensorRecords],
    *,
    num_nodes: int | None = None,
    seeds: Callable[[Context], int | None] = lambda context: None,
    model: Callable[[], nn.Module] = linear,
    tamper: Any = None,
) -> LocalGrid:
    """A grid whose nodes make their client anew for every message, as Flower does; clients are dealt in turn."""
    names = sorted(data)
    nodes = num_nodes or len(names)

    def client_fn(context: Context) -> LocalDPClient:
        part = int(context.node_config["partition-id"])
        hosted = {name: data[name] for name in names[part::nodes]}
        return LocalDPClient(model=model(), clients=hosted, recipe=recipe, noise_seed=seeds(context), device="cpu")

    app: ClientApp = client_app(client_fn)
    return LocalGrid(app, nodes, tamper=tamper)


def start(strategy: Any, grid: LocalGrid, num_rounds: int, model: Callable[[], nn.Module] = linear) -> Tensor:
    """Run a strategy; return the final model as one vector."""
    result = strategy.start(grid, model_arrays(model()), num_rounds=num_rounds)
    return torch.cat([value.flatten() for value in result.arrays.to_torch_state_dict().values()])


def vector_of(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def mean_gradient(weight: Tensor, data: TensorRecords, clip_norm: float, order: int = 2) -> Tensor:
    """The mean of clipped gradients of a linear model under cross-entropy, in closed form: (softmax - one-hot) x^T."""
    total = torch.zeros_like(weight)
    for x, y in zip(data.inputs.double(), data.targets, strict=True):
        gradient = torch.outer(torch.softmax(weight @ x, 0) - nn.functional.one_hot(y, CLASSES), x)
        total += gradient * min(1.0, clip_norm / float(torch.linalg.vector_norm(gradient, ord=order)))
    return total / len(data)


def worst_swap() -> tuple[nn.Module, TensorRecords, TensorRecords]:
    """A model, and two data sets that differ in one record, with clipped gradients as far apart as they can be: +C and -C."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    up, down = torch.zeros(8, 1), torch.zeros(8, 1)
    up[0], down[0] = 1e6, -1e6
    targets = torch.zeros(8, dtype=torch.int64)
    return model, TensorRecords(inputs=up, targets=targets), TensorRecords(inputs=down, targets=targets)


def watching(release: Release) -> tuple[Release, list[Any]]:
    """The same release, and what its noise was drawn for: sum, noise, scale and lattice of every draw, with the real draw inside."""
    seen: list[Any] = []
    mechanism: Any = type(release.mechanism)

    class Seen(mechanism):
        def noise(self, like: Any, scale: float, lattice: float, rng: Any) -> Any:
            drawn = super().noise(like, scale, lattice, rng)
            seen.append((like.numpy().copy(), drawn.numpy().copy(), scale, lattice))
            return drawn

    return replace(release, mechanism=Seen(noise_multiplier=release.mechanism.noise_multiplier)), seen


def assert_on_lattice(seen: list[Any], release: Release, step: float) -> None:
    """Sum and noise of every draw have the scale of the release, and lie on its lattice."""
    for total, drawn, scale, lattice in seen:
        assert (scale, lattice) == (release.noise_scale, step)
        for part in (total, drawn):
            np.testing.assert_array_equal(part / step, np.rint(part / step))


def filled(value: float, node: int = 1) -> Callable[[int, Message], list[Message]]:
    """A tamper: all numbers of the row of a node's replies are this one."""

    def tamper(sender: int, reply: Message) -> list[Message]:
        if sender == node:
            (record,) = reply.content.array_records.values()
            name = list(record)[-1]
            record[name] = Array(np.full_like(record[name].numpy(), value))
        return [reply]

    return tamper


def context_of(state=None, **node_config):
    """Return the context of a node, on a state that is there already or an empty one."""
    state = RecordDict() if state is None else state  # an empty one is false
    return Context(run_id=1, node_id=1, node_config=node_config, state=state, run_config={})


def reply_of(pipeline: Pipeline, vector: Any, job: ClientJob) -> Reply:
    """One client's reply; raises what a pipeline turns into a refusal."""
    (trained,) = pipeline.train.rows(vector, [job])
    made = pipeline._reply(trained, job)
    if isinstance(made, Refusal):
        raise ValueError(made.reason)
    return made


def private_row(contributions: np.ndarray, release: Release, rng: np.random.Generator) -> np.ndarray:
    """Return what leaves a client in an evaluation with these contributions [n, dimension]."""
    made = evaluation_pipeline(release, of=lambda vector, job: contributions, dimension=contributions.shape[1])
    row: np.ndarray = reply_of(made, np.zeros(0), ClientJob(name="a", records=[], seed=0, secret=lambda: rng)).row
    return row


def evaluated_row(
    model: FlatModel,
    data: Any,
    metrics: RecordMetrics,
    *,
    bounds: MetricBounds,
    release: Release,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return what leaves a client with these records in an evaluation."""
    of = RecordContributions(model=model, metrics=metrics, bounds=bounds, release=release)
    made = evaluation_pipeline(release, of=of, dimension=len(bounds.bounds))
    row: np.ndarray = reply_of(
        made, model.vector.clone(), ClientJob(name="a", records=data, seed=0, secret=lambda: rng)
    ).row.numpy()
    return row


def evaluated_alone(
    flat: FlatModel, data: Any, metrics: RecordMetrics, *, bound: float, relation: Any = "replace-one"
) -> np.ndarray:
    """Return what leaves a client that evaluates one metric, "first", under Laplace noise."""
    arguments = {"mechanism": "laplace", "clip_norm": 1.0, "epsilon": 1.0, "delta": 0.0, "num_replies": 3, "relation": relation}
    training = gradient_terms(**arguments, num_records=len(data))
    release = EvaluationBudget(epsilon=1.0, num_evaluations=1).terms("a", training).release
    bounds = MetricBounds(bounds={"first": bound})
    return evaluated_row(flat, data, metrics, bounds=bounds, release=release, rng=np.random.default_rng(0))


def one_reply(
    recipe: LocalRecipe,
    vector: Tensor,
    data: Any,
    release: Release,
    *,
    model: FlatModel,
    rng: Any,
    server_round: int = 1,
    seed: int = 0,
) -> Reply:
    """What one client sends, with secret choices and noise from `rng`; raises what a pipeline turns into a refusal."""
    job = ClientJob(name="", records=data, seed=seed, secret=lambda: rng)
    return reply_of(recipe.pipeline(release, model=model, server_round=server_round), vector, job)


def shared_noise_app(
    names: Callable[[Context], Iterable[str]] = lambda context: (f"c{context.node_id}",), **arguments: Any
) -> ClientApp:
    """An app of clients whose noise is the server's, or theirs together; each node hosts the clients that it names."""

    def client_fn(context: Context) -> DPClient:
        clients = dict.fromkeys(names(context), records("c0"))
        return DPClient(
            **{"model": linear(), "clients": clients, "training": Training(learning_rate=0.1), "device": "cpu"} | arguments
        )

    return client_app(client_fn)


def still_model(outputs: int = 2000) -> nn.Module:
    """A model of twice so many parameters, all of them zero."""
    model = nn.Linear(1, outputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def still_app(num_clients: int, outputs: int = 2000) -> ClientApp:
    """Clients whose update is zero, so that all that moves the model is noise: their step size is below float32's resolution."""
    data = TensorRecords(inputs=torch.ones(4, 1), targets=torch.zeros(4, dtype=torch.int64))

    def client_fn(context: Context) -> DPClient:
        part, parts = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        hosted = {f"c{index:03}": data for index in range(part, num_clients, parts)}
        return DPClient(model=still_model(outputs), clients=hosted, training=Training(learning_rate=1e-30), device="cpu")

    return client_app(client_fn)


def models_of(strategy: Any, grid: Any, arrays: Any, num_rounds: int) -> np.ndarray:
    """The initial model and that after each round of a run [rounds + 1, d]."""
    models: list[np.ndarray] = []

    def keep(server_round: int, current: Any) -> None:
        models.append(np.concatenate([array.numpy().ravel() for array in current.values()]).astype(np.float64))

    strategy.start(grid, arrays, num_rounds=num_rounds, evaluate_fn=keep)
    return np.stack(models)
