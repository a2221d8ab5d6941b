"""Deal the training records to clients. Only indices are dealt; no record is read or copied."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_dp.core import checks

PARTITIONS = ("iid", "dirichlet", "pathological", "label-shards", "het-mnist", "sample", "natural")
# Partitions that read `classes_per_client`.
WITH_CLASSES = ("pathological", "label-shards", "het-mnist")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The clients' indices under the "sample" partition, drawn at each access: a million clients take no time and no memory.

    Attributes:
        num_records: number of records in the pool.
        records_per_client: number of records that a client draws, without replacement.
        num_clients: number of clients.
        seed: seed of the deal.
    """

    num_records: int
    records_per_client: int
    num_clients: int
    seed: int

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int) -> np.ndarray:
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client}: must be 0 to {self.num_clients - 1}")
        return np.random.default_rng((self.seed, client)).choice(self.num_records, self.records_per_client, replace=False)


def partition(
    kind: str,
    labels: np.ndarray,
    *,
    num_clients: int,
    seed: int,
    dirichlet_alpha: float,
    classes_per_client: int,
    records_per_client: int,
    groups: np.ndarray | None = None,
) -> Sequence[np.ndarray] | Sampled:
    """Deal the records to clients; the result depends only on the arguments.

    No two clients share a record, except under "sample". The kinds are:

    - "iid": equal shares of a random order, of all records.
    - "dirichlet": all records; each class is divided in proportions from a symmetric Dirichlet distribution (flwr-datasets).
    - "pathological": each client has records of `classes_per_client` classes (flwr-datasets). Records of a class that no client
      got are left out; with at least as many clients as classes there are none.
    - "label-shards": records sorted by label and cut into equal shards; each client gets `classes_per_client` of them
      (McMahan et al. 2017, section 3). A shard can straddle two classes. A few random records that fill no shard are left out.
    - "het-mnist": each client has equally many records of each of `classes_per_client` classes, and all clients have equally many
      (HET_MNIST of Mohammadi et al., for any labels). The class that is scarcest for its clients sets the number; what other
      classes have more is left out.
    - "natural": each client is one of the devices that the data name.
    - "sample": each client draws `records_per_client` records from the pool, so clients can have records in common.

    Args:
        kind: one of `PARTITIONS`.
        labels: integer classes of the training records [n].
        num_clients: number of clients, >= 1.
        seed: seed of the deal, >= 0.
        dirichlet_alpha: concentration of the Dirichlet distribution, > 0; with a smaller one clients differ more.
        classes_per_client: number of classes (or shards) per client, for "pathological", "label-shards" and "het-mnist".
        records_per_client: number of records that each client keeps, chosen at random; 0: all.
        groups: device of each record [n], from 0 without gaps; None if the data name no devices.

    Returns:
        One int64 array of indices into the training set per client; none is empty.

    Raises:
        ValueError: if an argument is out of range, or a client would get no record or fewer than `records_per_client`.
    """
    labels = np.asarray(labels)
    _check_population(kind, labels, num_clients, records_per_client)
    checks.integer("seed", seed, at_least=0)
    if kind == "sample":
        return Sampled(num_records=len(labels), records_per_client=records_per_client, num_clients=num_clients, seed=seed)
    if kind == "dirichlet":
        checks.number("dirichlet-alpha", dirichlet_alpha, above=0)
    if kind in WITH_CLASSES and not (num_classes := len(np.unique(labels))) >= classes_per_client >= 1:
        raise checks.bad("classes-per-client", classes_per_client, f"1 to {num_classes}, the number of classes")
    rng = np.random.default_rng(seed)
    if kind == "natural":
        clients = _natural(groups, num_clients)
    elif kind == "iid":
        clients = np.array_split(rng.permutation(len(labels)), num_clients)
    elif kind == "het-mnist":
        clients = _equal_classes(labels, num_clients, classes_per_client, rng)
    elif kind == "label-shards":
        clients = _label_shards(labels, num_clients, classes_per_client, rng)
    else:
        clients = _through_flwr_datasets(kind, labels, num_clients, seed, dirichlet_alpha, classes_per_client)
    smallest = min(range(num_clients), key=lambda client: len(clients[client]))
    if len(clients[smallest]) < max(1, records_per_client):
        setting = f"records-per-client={records_per_client}" if records_per_client else f"num-clients={num_clients}"
        dealt = f"the {len(labels)} records that the {kind} partition deals to num-clients={num_clients}"
        raise ValueError(f"{setting}: client {smallest} gets only {len(clients[smallest])} of {dealt}")
    if records_per_client:
        rng = np.random.default_rng((seed, 1))  # not the deal's random stream
        clients = [rng.choice(records, records_per_client, replace=False) for records in clients]
    return clients


def _check_population(kind: str, labels: np.ndarray, num_clients: int, records_per_client: int) -> None:
    checks.one_of("partition", kind, PARTITIONS)
    if labels.ndim != 1 or len(labels) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels: must be a non-empty row of integers, is {labels.dtype} of shape {labels.shape}")
    checks.integer("num-clients", num_clients, at_least=1)
    if kind != "sample" and num_clients > len(labels):
        raise checks.bad("num-clients", num_clients, f"at most the number of training records, {len(labels)}")
    lowest = 1 if kind == "sample" else 0
    if not lowest <= records_per_client <= len(labels):
        wanted = f"{lowest} to {len(labels)}, the number of training records, under partition={kind!r}"
        raise checks.bad("records-per-client", records_per_client, wanted)


def _natural(groups: np.ndarray | None, num_clients: int) -> list[np.ndarray]:
    if groups is None:
        raise ValueError("partition='natural': the task's data name no devices; use another partition")
    counts = np.bincount(groups)
    if num_clients != len(counts):
        raise ValueError(
            f"num-clients={num_clients}: must be {len(counts)} with partition='natural', the number of devices in the data"
        )
    return np.split(np.argsort(groups, kind="stable"), np.cumsum(counts)[:-1])


def _equal_classes(labels: np.ndarray, num_clients: int, classes_per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal shares of one size. A client's shares have different classes, and classes' numbers of shares differ by at most one."""
    _, numbers = np.unique(labels, return_inverse=True)
    counts = np.bincount(numbers)
    taken = np.zeros(len(counts), dtype=np.int64)
    chosen = []
    for _ in range(num_clients):
        # The classes with the fewest shares so far; ties in random order.
        classes = np.lexsort((rng.random(len(counts)), taken))[:classes_per_client]
        taken[classes] += 1
        chosen.append(classes)
    size = int(min(counts[taken > 0] // taken[taken > 0]))
    pools = [iter(rng.permutation(np.flatnonzero(numbers == number))) for number in range(len(counts))]
    return [np.fromiter((next(pools[number]) for number in classes for _ in range(size)), dtype=np.int64) for classes in chosen]


def _label_shards(labels: np.ndarray, num_clients: int, shards_per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    num_shards = num_clients * shards_per_client
    size = len(labels) // num_shards
    if size == 0:
        needs = f"with classes-per-client={shards_per_client} needs {num_shards} shards"
        raise ValueError(f"num-clients={num_clients}: {needs}, but there are only {len(labels)} training records")
    # Without a random order first, the records left out would always be of the last class, and a shard's records would be
    # neighbors in the file.
    order = rng.permutation(len(labels))[: num_shards * size]
    shards = order[np.argsort(labels[order], kind="stable")].reshape(num_shards, size)
    return list(shards[rng.permutation(num_shards)].reshape(num_clients, shards_per_client * size))


def _through_flwr_datasets(
    kind: str, labels: np.ndarray, num_clients: int, seed: int, dirichlet_alpha: float, classes_per_client: int
) -> list[np.ndarray]:
    with warnings.catch_warnings():
        # Its warnings report retries and unused classes; the caller checks the outcome instead.
        warnings.simplefilter("ignore")
        # Imported here because it takes seconds and 200 MB (pandas, pyarrow, seaborn). A data set made in memory uses no network
        # and writes no cache.
        from datasets import Dataset  # noqa: PLC0415
        from flwr_datasets import partitioner as parts  # noqa: PLC0415

        partitioner: Any
        if kind == "dirichlet":
            alpha = float(dirichlet_alpha)
            partitioner = parts.DirichletPartitioner(num_clients, "label", alpha, min_partition_size=1, seed=seed)
        else:
            # This assignment gives the first class round robin, so every class is used.
            partitioner = parts.PathologicalPartitioner(
                num_clients, "label", classes_per_client, class_assignment_mode="first-deterministic", seed=seed
            )
        partitioner.dataset = Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
        try:
            return [np.asarray(partitioner.load_partition(client)["index"][:], dtype=np.int64) for client in range(num_clients)]
        except ValueError as error:
            setting = f"dirichlet-alpha={dirichlet_alpha}" if kind == "dirichlet" else f"classes-per-client={classes_per_client}"
            why = f"with {setting} some clients get none of the {len(labels)} records ({error})"
            raise ValueError(f"num-clients={num_clients}: {why}; use fewer clients, or another value") from error
