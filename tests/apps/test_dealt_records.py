"""Who holds which records: what clients train on, and what they hold out, which nobody protects."""

import numpy as np
import pytest

from flower_dp.apps.records import config_of, deal, split
from flower_dp.apps.settings import Settings
from flower_dp.apps.tasks.partitions import Sampled
from tests.app_runs import DEFAULTS

CANCER = {"task": "breast-cancer", "num-clients": 12}


def config(**changes):
    return config_of({**DEFAULTS, **CANCER, **{key.replace("_", "-"): value for key, value in changes.items()}})


def rows(records):
    return records.indices.tolist()


@pytest.mark.parametrize("partition", ["dirichlet", "label-shards"])
def test_nobody_trains_on_a_record_that_anybody_holds_out(partition):
    ratios = {"validation_ratio": 0.1, "test_ratio": 0.2}
    whole, held = deal(config(partition=partition)), deal(config(partition=partition, **ratios))
    trained_on = [row for records in held.clients.values() for row in rows(records)]
    everything = [*trained_on, *rows(held.validation), *rows(held.test)]
    assert len(set(everything)) == len(everything)
    # Every client holds out its own records, and no record is lost.
    assert sorted(everything) == sorted(row for records in whole.clients.values() for row in rows(records))
    for name, records in held.clients.items():
        size = len(whole.clients[name])
        assert set(rows(records)) <= set(rows(whole.clients[name]))
        assert len(records) == size - int(0.1 * size + 0.5) - int(0.2 * size + 0.5)


def test_nobody_is_left_without_records():
    with pytest.raises(ValueError, match=r"validation-ratio=0\.5: with test-ratio=0\.4 client 0 holds out all its 1 records"):
        split([np.arange(1)], Settings(validation_ratio=0.5, test_ratio=0.4))
    with pytest.raises(ValueError, match=r"test-ratio=0\.1: all clients together hold out no record"):
        split([np.arange(4)], Settings(test_ratio=0.1))


# the pilot


def test_many_clients_are_dealt_without_drawing_for_each(monkeypatch):
    """Their records are drawn when they are asked for, and are the same on the node that hosts them as in the whole run."""
    settings = {"partition": "sample", "records_per_client": 3}
    drawn = []
    draw = Sampled.__getitem__
    monkeypatch.setattr(Sampled, "__getitem__", lambda self, client: drawn.append(client) or draw(self, client))
    clients = deal(config(num_clients=100_000, **settings)).clients
    hosted = clients.part(1, 3)
    assert (len(clients), len(hosted), next(iter(hosted))) == (100_000, 33_333, "client-00001")
    assert not drawn
    assert rows(hosted["client-00004"]) == rows(clients["client-00004"]) != rows(clients["client-00007"])
    assert drawn == [4, 4, 7]
    with pytest.raises(KeyError):
        hosted["client-00005"]
