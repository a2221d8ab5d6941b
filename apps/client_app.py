"""The Flower ClientApp: every node hosts the clients i with i mod num-partitions = partition-id."""

from functools import lru_cache

from flwr.app import Context

from apps.device import hosted, own_settings
from apps.methods import Run
from apps.records import Config, config_of, deal
from flower_dp.clients import client_app
from flower_dp.clients.node_client import NodeClient
from flower_dp.clients.training.devices import default_device


def client_fn(context: Context) -> NodeClient:
    """Return the node's clients, on the device's own terms; made once a process, and kept between messages.

    Raises:
        ValueError: for a run-config or a node-config that makes no sense, or that the device does not take part in.
    """
    own = own_settings(context.run_config, context.node_config, dealt=True)
    return _client(config_of(own), *hosted(context.node_config))


@lru_cache(maxsize=8)
def _client(own: Config, part: int, parts: int) -> NodeClient:
    run = Run.of(dict(own))
    clients = deal(own).clients
    return run.client(
        run.model(),
        clients.part(part, parts).on(default_device()),
        lambda: {name: len(records) for name, records in clients.items()},
    )


app = client_app(client_fn)
