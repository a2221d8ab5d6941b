"""Devices whose replies Flower's grid can't unpack: the run of the others goes on as without them."""

import numpy as np
import pytest
import torch
from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id  # noqa: TID251
from torch import nn

from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from tests.grids import LocalGrid
from tests.http_grids import LocalHttpGrid

RECORDS = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))


class HttpGrid(LocalHttpGrid):
    """Flower's own grid, with a SuperLink in this process that passes on what devices have packed; node 4 forges it."""

    def __init__(self, forge):
        def client_fn(context):
            return DPClient(model=nn.Linear(2, 2), clients={f"c{context.node_id}": RECORDS}, training=Training(learning_rate=0.1))

        super().__init__(LocalGrid(client_app(client_fn), 4))
        self.forge = forge

    def reply(self, message, reply, objects):
        number = reply.object_id
        if message.metadata.dst_node_id == 4:
            number, objects = self.forge(number, objects, reply)
        return number, objects, objects


def garbage(number, objects, reply):
    content = b"Message  3\x00\xff\xff\xff"
    return get_object_id(content), {get_object_id(content): content}


def array(number, objects, reply):
    part = Array(np.zeros(2, np.float32))
    return part.object_id, {name: one.deflate() for name, one in get_all_nested_objects(part).items()}


def without_content(number, objects, reply):
    return number, {number: objects[number].replace(b"\x00", b"", 1)}


def of_another(number, objects, reply):
    reply.metadata.__dict__["_src_node_id"], reply.metadata.__dict__["_reply_to_message_id"] = 1, "another"
    return honest(reply.object_id, objects, reply)


def honest(number, objects, reply):
    return number, {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}


@pytest.mark.parametrize(("forge", "replies"), [(garbage, 3), (array, 3), (without_content, 3), (of_another, 3), (honest, 4)])
def test_a_reply_that_flowers_grid_cant_unpack_ends_no_run(forge, replies):
    strategy = DPFedAvg(
        clip_norm=0.5, noise_multiplier=1.0, sampling=FullSampling(), num_clients=3, delta=1e-3, registration_timeout=20.0
    )
    strategy.start(HttpGrid(forge), model_arrays(nn.Linear(2, 2)), num_rounds=2, timeout=20.0)
    assert [report.replies for report in strategy.rounds] == [replies] * 2


@pytest.mark.parametrize("forge", [garbage, array, of_another])
def test_an_update_that_flowers_grid_cant_unpack_counts_as_missing(forge):
    """Of a node that has named its client honestly."""

    def later(number, objects, reply):
        made = honest if reply.metadata.message_type == "query" else forge
        return made(number, objects, reply)

    strategy = DPFedAvg(clip_norm=0.5, noise_multiplier=1.0, sampling=FullSampling(), num_clients=4, delta=1e-3)
    strategy.start(HttpGrid(later), model_arrays(nn.Linear(2, 2)), num_rounds=2, timeout=20.0)
    assert [report.replies for report in strategy.rounds] == [3, 3]
    assert strategy.missing.silent == 2
