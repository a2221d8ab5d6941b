"""Flower's own grid over HTTP, with a SuperLink in this process."""

from flwr.proto.message_pb2 import Message as Packed
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: TID251
from flwr.superlink.grid import http_grid

from flower_dp.simulation.flwr_internals import run_of


class LocalHttpGrid(http_grid.HttpGrid):
    """Flower's own grid; the SuperLink passes on what the nodes of a `LocalGrid` have packed.

    Attributes:
        local: the nodes.
        objects: the content of all objects that were uploaded, by id.
    """

    def __init__(self, local):
        super().__init__(token="made up")  # noqa: S106
        self.local, self.packed, self.objects = local, {}, {}
        self._client, self._run = self, run_of(1)

    def get_node_ids(self):
        return self.local.get_node_ids()

    def push_messages(self, messages):
        ids = []
        for message in messages:
            (reply,) = self.local.send_and_receive([message])
            objects = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
            number, objects, uploaded = self.reply(message, reply, objects)
            self.objects |= uploaded
            ids.append(message.metadata.message_id)
            self.packed[ids[-1]] = ids[-1], number, list(objects)
        return ids

    def reply(self, message, reply, objects):
        """Return the id of the reply, its objects, and those of them that are uploaded."""
        return reply.object_id, objects, objects

    # Of the SuperLink

    def PullMessages(self, request):
        there = [self.packed.pop(number) for number in request.message_ids if number in self.packed]
        trees = [ObjectTree(object_id=number, children=[ObjectTree(object_id=one) for one in rest]) for _, number, rest in there]
        messages = [Packed(metadata=Metadata(message_id=number, reply_to_message_id=asked)) for asked, number, _ in there]
        return PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)

    def PullObject(self, request):
        content = self.objects.get(request.object_id)
        return PullObjectResponse(object_found=True, object_available=content is not None, object_content=content or b"")

    def ConfirmMessageReceived(self, request):
        pass
