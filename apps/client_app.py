"""The Flower ClientApp: every node hosts the clients i with i mod num-partitions = partition-id."""

from functools import lru_cache
from typing import Any

import torch
from flwr.app import Context

from apps.methods import Run
from apps.tasks import load_task
from apps.tasks.models import make
from apps.tasks.partitions import partition
from flower_dp.clients import TensorRecords, client_app
from flower_dp.clients.client import NodeClient


def standardize(images: torch.Tensor) -> torch.Tensor:
    """Turn uint8 pixels into float32 numbers with the published mean and deviation of MNIST taken out."""
    return (images.to(torch.float32) - 255 * 0.1307) / (255 * 0.3081)


def client_fn(context: Context) -> NodeClient:
    """Return the node's clients; made once a process, and kept between messages."""
    config = tuple(sorted(context.run_config.items()))
    part, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    return _client(config, part, parts)


@lru_cache(maxsize=8)
def _client(config: tuple[tuple[str, Any], ...], part: int, parts: int) -> NodeClient:
    run = Run.of(dict(config))
    settings = run.settings
    names, clients = all_records(config)
    return run.client(
        make(settings.model, bias=settings.model_bias, seed=settings.seed),
        {name: clients[name] for name in names[part::parts]},
        lambda: {name: len(records) for name, records in clients.items()},
    )


@lru_cache(maxsize=2)
def all_records(config: tuple[tuple[str, Any], ...]) -> tuple[list[str], dict[str, TensorRecords]]:
    """Deal the task's records to all clients, the same way on every node."""
    settings = Run.of(dict(config)).settings
    task = load_task(settings.task, settings.data_dir)
    dealt = partition(
        settings.partition,
        task.train_labels,
        num_clients=settings.num_clients,
        seed=settings.seed,
        dirichlet_alpha=settings.dirichlet_alpha,
        classes_per_client=settings.classes_per_client,
        records_per_client=settings.records_per_client,
    )
    images, labels = torch.from_numpy(task.train_images), torch.from_numpy(task.train_labels)
    names = settings.client_names()
    return names, {
        name: TensorRecords(inputs=images, targets=labels, indices=torch.from_numpy(indices), transform=standardize)
        for name, indices in zip(names, dealt, strict=True)
    }


app = client_app(client_fn)
