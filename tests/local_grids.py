"""Small problems and grids for the tests of methods with local noise."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flower_dp.clients import DPClient, FlatModel, LocalDPClient, RecordMetrics, TensorRecords, Training, client_app, model_arrays
from flower_dp.clients.local.client import LocalRecipe
from flower_dp.clients.local.evaluation import RecordContributions
from flower_dp.clients.local.row import evaluation_pipeline
from flower_dp.clients.reply.pipeline import Job, Pipeline, Refusal, Reply
from flower_dp.core.metric_bounds import MetricBounds
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


def context_of(state=None, **node_config):
    """Return the context of a node, on a state that is there already or an empty one."""
    state = RecordDict() if state is None else state  # an empty one is false
    return Context(run_id=1, node_id=1, node_config=node_config, state=state, run_config={})


def reply_of(pipeline: Pipeline, vector: Any, job: Job) -> Reply:
    """One client's reply; raises what a pipeline turns into a refusal."""
    (trained,) = pipeline.train.rows(vector, [job])
    made = pipeline._reply(trained, job)
    if isinstance(made, Refusal):
        raise ValueError(made.reason)
    return made


def private_row(contributions: np.ndarray, release: Release, rng: np.random.Generator) -> np.ndarray:
    """Return what leaves a client in an evaluation with these contributions [n, dimension]."""
    made = evaluation_pipeline(release, of=lambda vector, job: contributions, dimension=contributions.shape[1])
    row: np.ndarray = reply_of(made, np.zeros(0), Job(name="a", records=[], seed=0, secret=lambda: rng)).row
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
    row: np.ndarray = reply_of(made, model.vector.clone(), Job(name="a", records=data, seed=0, secret=lambda: rng)).row.numpy()
    return row


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
    job = Job(name="", records=data, seed=seed, secret=lambda: rng)
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
