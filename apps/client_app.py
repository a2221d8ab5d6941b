"""The Flower ClientApp: every node hosts the clients i with i mod num-partitions = partition-id."""

from functools import lru_cache

from flwr.app import Context

from apps.device import own_settings
from apps.methods import Run
from apps.records import Config, config_of, deal
from flower_dp.clients import client_app
from flower_dp.clients.client import NodeClient


def client_fn(context: Context) -> NodeClient:
    """Return the node's clients, on the device's own terms; made once a process, and kept between messages."""
    part, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    return _client(config_of(context.run_config), config_of(own_settings(context.run_config, context.node_config)), part, parts)


@lru_cache(maxsize=8)
def _client(config: Config, own: Config, part: int, parts: int) -> NodeClient:
    run = Run.of(dict(own))
    clients = deal(config).clients
    return run.client(
        run.model(),
        clients.part(part, parts),
        lambda: {name: len(records) for name, records in clients.items()},
    )


app = client_app(client_fn)
