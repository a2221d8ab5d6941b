"""Devices whose replies Flower's grid can't unpack: the run of the others goes on as without them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array
from flwr.proto.message_pb2 import Message as Packed
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id  # noqa: TID251
from flwr.superlink.grid import http_grid
from torch import nn

from flower_dp.clients import DPClient, TensorRecords, Training, client_app, model_arrays
from flower_dp.core.sampling import FullSampling
from flower_dp.strategies import DPFedAvg
from tests.grids import LocalGrid

RECORDS = TensorRecords(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64))


class HttpGrid(http_grid.HttpGrid):
    """Flower's own grid, with a SuperLink in this process that passes on what devices have packed; node 4 forges it."""

    def __init__(self, forge):
        def client_fn(context):
            return DPClient(model=nn.Linear(2, 2), clients={f"c{context.node_id}": RECORDS}, training=Training(learning_rate=0.1))

        super().__init__(token="made up")  # noqa: S106
        self.forge, self.local, self.packed, self.objects = forge, LocalGrid(client_app(client_fn), 4), {}, {}
        self._client, self._run = self, SimpleNamespace(run_id=1)

    def get_node_ids(self):
        return self.local.get_node_ids()

    def push_messages(self, messages):
        ids = []
        for message in messages:
            (reply,) = self.local.send_and_receive([message])
            objects = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
            number = reply.object_id
            if message.metadata.dst_node_id == 4:
                number, objects = self.forge(number, objects, reply)
            self.objects |= objects
            ids.append(message.metadata.message_id)
            self.packed[ids[-1]] = number, list(objects)
        return ids

    # Of the SuperLink

    def PullMessages(self, request):
        there = [self.packed.pop(number) for number in request.message_ids if number in self.packed]
        trees = [ObjectTree(object_id=number, children=[ObjectTree(object_id=one) for one in rest]) for number, rest in there]
        messages = [Packed(metadata=Metadata(message_id=number)) for number, _ in there]
        return PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)

    def PullObject(self, request):
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        pass


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
