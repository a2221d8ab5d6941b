"""The records of a task that each client has, and the public records of the server."""

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
    """The records of some clients by name, made when they are asked for.

    A worker that hosts a million clients keeps only their names, without a tensor or other object for each, which Python's
    garbage collector would visit again and again.

    Attributes:
        pool: all training records of the task.
        dealt: which records every client of the run has.
        names: of these clients, each with its place in `dealt`.
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
        """Return every `parts`-th of these clients, from the one at `part` on."""
        return replace(self, names=dict(islice(self.names.items(), part, None, parts)))

    def on(self, device: torch.device) -> "Clients":
        """Return these clients with their records in a GPU's memory, if they fit."""
        return replace(self, pool=_copies(device)(self.pool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """All records of a run, the same on every node and on the server.

    Attributes:
        clients: what every client trains on, by name.
        validation: what all clients together have held out for validation; taken as public. None without `validation-ratio`.
        test: the same for tests, by `test-ratio`; None without that.
    """

    clients: Clients
    validation: TensorRecords | None
    test: TensorRecords | None


def config_of(run_config: Mapping[str, Any]) -> Config:
    """Return a run-config in the hashable form that `deal` needs for its cache."""
    return tuple(sorted(run_config.items()))


@lru_cache(maxsize=2)
def deal(config: Config) -> Dealt:
    """Deal the task's records to all clients, and split each client's records into those to train on and those held out.

    Raises:
        ValueError: if the records cannot be read or dealt so, naming the setting.
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
    names = {name: place for place, name in enumerate(settings.client_names())}
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


@lru_cache(maxsize=2)  # the runs of a sweep share it, whatever else they differ in
def _dealt(task: Task, kind: str, **arguments: Any) -> Sequence[np.ndarray] | Sampled:
    return partition(kind, task.train_labels, groups=task.groups, **arguments)


def split(
    dealt: Sequence[np.ndarray] | Sampled, settings: Settings
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Split every client's records at random into those to train on, for validation and for test.

    The held-out numbers are the ratios of the client's, rounded half up; the other records are to train on.

    Raises:
        ValueError: if a client would have none to train on, or all clients together none for validation or test.
    """
    parts: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    for client in range(len(dealt)):
        indices = dealt[client]
        rng = np.random.default_rng((settings.seed, 2, client))  # a random stream other than that of `deal`
        shuffled = rng.permutation(indices)
        first, second = (int(ratio * len(indices) + 0.5) for ratio in (settings.validation_ratio, settings.test_ratio))
        if first + second >= len(indices):
            why = f"with test-ratio={settings.test_ratio} client {client}, who has {len(indices)} records, has none to train on"
            raise refusal("validation-ratio", settings.validation_ratio, why)
        pieces = shuffled[first + second :], shuffled[:first], shuffled[first : first + second]
        for part, piece in zip(parts, pieces, strict=True):
            part.append(np.sort(piece))
    for key, ratio, part in (("validation", settings.validation_ratio, parts[1]), ("test", settings.test_ratio, parts[2])):
        if ratio and not sum(map(len, part)):
            raise refusal(f"{key}-ratio", ratio, "all clients together hold out no record; they have too few, or it is too small")
    return parts


def sizes_of(run_config: Mapping[str, Any]) -> Sizes:
    """Return what gives every client's number of records to train on, dealt as the clients deal them."""
    return lambda: {name: len(records) for name, records in deal(config_of(run_config)).clients.items()}


def records_to_test_with(run: ParsedRunConfig, config: Config) -> TensorRecords:
    """Return the server's test records: those that clients hold out, or else the task's own test set.

    Raises:
        ValueError: if there is neither.
    """
    held_out = deal(config).test if run.settings.test_ratio else None
    if held_out is not None:
        return held_out
    task = run.task()
    if not len(task.test_labels):
        why = f"task={run.settings.task!r} has no test set of its own; set the part of their records that clients hold out"
        raise refusal("test-ratio", run.settings.test_ratio, f"{why}, such as 0.1")
    return TensorRecords(
        inputs=torch.from_numpy(task.test_inputs), targets=torch.from_numpy(task.test_labels), transform=task.prepare
    )


@lru_cache(maxsize=1)
def _copies(device: torch.device) -> OnDevice:
    """Return what this process keeps in a GPU's memory: the same for all nodes and runs that it hosts."""
    return OnDevice(device)


def _held(pool: TensorRecords, indices: np.ndarray) -> TensorRecords:
    return replace(pool, indices=torch.from_numpy(indices))
