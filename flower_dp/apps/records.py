"""The records of each client of a task, and the public records of the server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.settings import Settings
from flower_dp.apps.strategy_arguments import Sizes
from flower_dp.apps.tasks import Task
from flower_dp.apps.tasks.partitions import Sampled, partition
from flower_dp.clients import TensorRecords
from flower_dp.clients.training.records import OnDevice
from flower_dp.core.checks import refusal

Config = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients(Mapping[str, TensorRecords]):
    """The records of some clients by name, made at each access.

    A worker may host a million clients. It keeps only their names: Python's garbage collector would visit a tensor or another
    object of each client again and again.

    Attributes:
        pool: all training records of the task.
        dealt: indices of the records of every client of the run.
        names: names of these clients, each with its index in `dealt`.
    """

    pool: TensorRecords
    dealt: Sequence[np.ndarray] | Sampled
    names: dict[str, int]

    def __getitem__(self, name: str) -> TensorRecords:
        return _held(self.pool, self.dealt[self.names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def part(self, part: int, parts: int) -> "Clients":
        """Return every `parts`-th of these clients, beginning with number `part`."""
        return replace(self, names=dict(islice(self.names.items(), part, None, parts)))

    def on(self, device: torch.device) -> "Clients":
        """Return these clients with their records in a GPU's memory, if they fit."""
        return replace(self, pool=_copies(device)(self.pool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """The records of a run, the same on every node and on the server.

    Attributes:
        clients: training records of every client, by name.
        validation: records that all clients together hold out for validation, taken as public; None without `validation-ratio`.
        test: records that all clients together hold out for tests, taken as public; None without `test-ratio`.
    """

    clients: Clients
    validation: TensorRecords | None
    test: TensorRecords | None


def config_of(run_config: Mapping[str, Any]) -> Config:
    """Return a run-config in hashable form, for the cache of `deal`."""
    return tuple(sorted(run_config.items()))


@lru_cache(maxsize=2)
def deal(config: Config) -> Dealt:
    """Deal the task's records to all clients, and split each client's records into training and held-out records.

    Raises:
        ValueError: if the records cannot be read or dealt, naming the setting.
    """
    run = ParsedRunConfig.of(dict(config))
    settings, task = run.settings, run.task()
    dealt = _dealt(
        task,
        settings.partition,
        num_clients=settings.num_clients,
        seed=settings.seed,
        dirichlet_alpha=settings.dirichlet_alpha,
        classes_per_client=settings.classes_per_client,
        records_per_client=settings.records_per_client,
    )
    names = {name: index for index, name in enumerate(settings.client_names())}
    pool = TensorRecords(
        inputs=torch.from_numpy(task.train_inputs), targets=torch.from_numpy(task.train_labels), transform=task.prepare
    )
    if not settings.holds_out:
        return Dealt(clients=Clients(pool=pool, dealt=dealt, names=names), validation=None, test=None)
    train, validation, test = split(dealt, settings)
    return Dealt(
        clients=Clients(pool=pool, dealt=train, names=names),
        validation=_held(pool, np.concatenate(validation)) if settings.validation_ratio else None,
        test=_held(pool, np.concatenate(test)) if settings.test_ratio else None,
    )


@lru_cache(maxsize=2)  # the runs of a sweep share the deal, although their other settings differ
def _dealt(task: Task, kind: str, **arguments: Any) -> Sequence[np.ndarray] | Sampled:
    return partition(kind, task.train_labels, groups=task.groups, **arguments)


def split(
    dealt: Sequence[np.ndarray] | Sampled, settings: Settings
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Split every client's records at random into training, validation and test records.

    The numbers of validation and test records are the client's number times the ratios, rounded half up.

    Raises:
        ValueError: if a client would have no training record, or all clients together no validation or test record.
    """
    parts: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    for client in range(len(dealt)):
        indices = dealt[client]
        rng = np.random.default_rng((settings.seed, 2, client))  # a random stream other than that of `deal`
        shuffled = rng.permutation(indices)
        first, second = (int(ratio * len(indices) + 0.5) for ratio in (settings.validation_ratio, settings.test_ratio))
        if first + second >= len(indices):
            why = f"with test-ratio={settings.test_ratio} client {client} holds out all its {len(indices)} records; lower a ratio"
            raise refusal("validation-ratio", settings.validation_ratio, why)
        pieces = shuffled[first + second :], shuffled[:first], shuffled[first : first + second]
        for part, piece in zip(parts, pieces, strict=True):
            part.append(np.sort(piece))
    for key, ratio, part in (("validation", settings.validation_ratio, parts[1]), ("test", settings.test_ratio, parts[2])):
        if ratio and not sum(map(len, part)):
            raise refusal(f"{key}-ratio", ratio, "all clients together hold out no record; raise the ratio, or use fewer clients")
    return parts


def sizes_of(run_config: Mapping[str, Any]) -> Sizes:
    """Return a function that deals the records as the clients do, and returns each client's number of training records."""
    return lambda: {name: len(records) for name, records in deal(config_of(run_config)).clients.items()}


def records_to_test_with(run: ParsedRunConfig, config: Config) -> TensorRecords:
    """Return the server's test records: those that clients hold out, else the task's own test set.

    Raises:
        ValueError: if neither exists.
    """
    held_out = deal(config).test if run.settings.test_ratio else None
    if held_out is not None:
        return held_out
    task = run.task()
    if not len(task.test_labels):
        why = f"task={run.settings.task!r} has no test set of its own; set the fraction that clients hold out, such as 0.1"
        raise refusal("test-ratio", run.settings.test_ratio, why)
    return TensorRecords(
        inputs=torch.from_numpy(task.test_inputs), targets=torch.from_numpy(task.test_labels), transform=task.prepare
    )


@lru_cache(maxsize=1)
def _copies(device: torch.device) -> OnDevice:
    """Return the records that this process keeps in a GPU's memory, shared by all its nodes and runs."""
    return OnDevice(device)


def _held(pool: TensorRecords, indices: np.ndarray) -> TensorRecords:
    return replace(pool, indices=torch.from_numpy(indices))
