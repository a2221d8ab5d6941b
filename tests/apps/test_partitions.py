import os
import socket
import tracemalloc

import numpy as np
import pytest

from flower_dp.apps.tasks.partitions import PARTITIONS, partition

CLASSES = 10
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), 400))
FEW = np.random.default_rng(2).permutation(np.repeat(np.arange(CLASSES), 80))
GROUPS = np.random.default_rng(1).permutation(np.arange(len(LABELS)) % 20)


def deal(kind, *, labels=LABELS, **changes):
    settings = {
        "num_clients": 20,
        "seed": 0,
        "dirichlet_alpha": 0.3,
        "classes_per_client": 2,
        "records_per_client": 30 if kind == "sample" else 0,
        "groups": GROUPS[: len(labels)] if kind == "natural" else None,
    }
    return partition(kind, labels, **(settings | changes))


def classes_of(clients, labels=LABELS):
    return [set(labels[records].tolist()) for records in clients]


@pytest.mark.parametrize("kind", PARTITIONS)
def test_records_are_dealt_once_and_as_the_seed_says(kind, monkeypatch):
    """Without network, and without a change of NumPy's own generator or of the environment."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    environment = dict(os.environ)
    state = np.random.get_state()[1].copy()  # noqa: NPY002 - it is what must not change
    clients, again, other = (deal(kind, labels=FEW, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert dict(os.environ) == environment
    assert all(np.array_equal(a, b) for a, b in zip(clients, again, strict=True))
    # Natural clients are what they are.
    assert all(np.array_equal(a, b) for a, b in zip(clients, other, strict=True)) == (kind == "natural")
    assert len(clients) == 20
    for records in clients:
        assert records.dtype == np.int64
        assert records.ndim == 1
        assert len(records) == len(set(records.tolist())) >= 1
        assert records.min() >= 0
        assert records.max() < len(FEW)
    if kind != "sample":
        assert sorted(np.concatenate(clients).tolist()) == list(range(len(FEW)))


def test_pathological_class_count():
    assert {len(held) for held in classes_of(deal("pathological", labels=FEW, classes_per_client=5), FEW)} == {5}


def test_label_shards_class_count_and_sizes():
    # 400 records a class and a shard size that divides it: no shard straddles two classes.
    clients = deal("label-shards", num_clients=100, classes_per_client=2)
    assert {len(records) for records in clients} == {40}
    held = [len(c) for c in classes_of(clients)]
    assert max(held) == 2
    assert np.mean(held) > 1.6  # two of a client's shards are of one class with probability about 1/10


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "pathological", "label-shards"])
def test_trimming_keeps_part_of_each_clients_own_records(kind):
    settings = {"dirichlet_alpha": 100.0, "labels": FEW}
    whole, trimmed = deal(kind, **settings), deal(kind, records_per_client=10, **settings)
    assert {len(records) for records in trimmed} == {10}
    assert all(set(part.tolist()) <= set(full.tolist()) for part, full in zip(trimmed, whole, strict=True))


def test_samples_are_uniform_and_overlap():
    clients = deal("sample", num_clients=2000, records_per_client=100)
    counts = np.bincount(np.concatenate(clients), minlength=4000)
    # Binomial(2000, 1/40): mean 50, sd 6.98; 6 sd over 4,000 counts fails by chance in less than 1e-4.
    assert np.abs(counts - 50).max() < 6 * 6.98
    # The variance over records is that of the binomial: 48.75 within 5 standard errors (2.2 % each).
    assert abs(counts.var() - 48.75) < 5 * 0.0224 * 48.75


def test_a_sample_costs_what_it_holds_however_many_records_there_are():
    labels = np.broadcast_to(np.int64(0), 10**8)
    tracemalloc.start()
    clients = deal("sample", labels=labels, num_clients=1000, records_per_client=20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(records) for records in clients] == [20] * 1000
    assert peak < 1e6  # 160 kB are the indices themselves; one permutation of the records would be 800 MB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "random",
            {},
            "partition='random': must be one of iid, dirichlet, pathological, label-shards, het-mnist, sample, natural",
        ),
        ("iid", {"num_clients": 4001}, "num-clients=4001: must be at most the number of training records, 4000"),
        ("sample", {"records_per_client": 0}, "records-per-client=0: must be 1 to 4000"),
        ("dirichlet", {"dirichlet_alpha": 0.0}, "dirichlet-alpha=0.0: must be a finite number > 0"),
        ("dirichlet", {"num_clients": 75, "labels": LABELS[:100]}, "num-clients=75: .* some clients get none of the 100"),
        ("pathological", {"classes_per_client": 11}, "classes-per-client=11: must be 1 to 10"),
        ("label-shards", {"classes_per_client": 0}, "classes-per-client=0: must be 1 to 10"),
        ("iid", {"num_clients": 1000, "records_per_client": 5}, "records-per-client=5: client 0 gets only 4 of the 4000 .*=1000"),
        ("natural", {"num_clients": 19}, "num-clients=19: must be 20 with partition='natural'"),
        ("natural", {"groups": None}, "partition='natural': the task's data name no devices"),
        ("label-shards", {"num_clients": 2001}, "num-clients=2001: with classes-per-client=2 needs 4002 shards"),
        ("iid", {"labels": np.zeros(3)}, "labels: must be a non-empty row of integers"),
    ],
)
def test_bad_input(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        deal(kind, **changes)


# HET_MNIST


@pytest.mark.parametrize("classes_per_client", [1, 3, 10])
def test_het_mnist_clients_have_equally_many_of_each_of_their_classes(classes_per_client):
    clients = deal("het-mnist", num_clients=100, classes_per_client=classes_per_client)
    # 100 n shares among 10 classes of 400 records: 400 / (10 n), rounded down.
    share = 400 // (10 * classes_per_client)
    for records in clients:
        assert sorted(np.bincount(LABELS[records])[np.bincount(LABELS[records]) > 0]) == [share] * classes_per_client
    dealt = np.concatenate(clients)
    assert len(set(dealt.tolist())) == len(dealt)
    assert np.bincount(LABELS[dealt]).tolist() == [share * 10 * classes_per_client] * 10


def test_het_mnist_of_labels_that_do_not_start_at_zero():
    labels = np.repeat([-1, 1], [30, 51])
    clients = deal("het-mnist", labels=labels, num_clients=3, classes_per_client=2)
    assert [np.bincount(labels[records] + 1).tolist() for records in clients] == [[10, 0, 10]] * 3


# Natural clients


def test_natural_clients_are_the_devices_in_the_data():
    clients = deal("natural")
    assert all(set(GROUPS[records].tolist()) == {device} for device, records in enumerate(clients))
