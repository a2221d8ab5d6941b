"""The Flower ClientApp: each node hosts the clients i with i mod num-partitions = partition-id."""

from flwr.app import Context

from flower_dp.apps.device_settings import hosted, own_settings
from flower_dp.apps.methods import ParsedRunConfig
from flower_dp.apps.records import Config, config_of, deal, sizes_of
from flower_dp.apps.vector_store import Kept, kept_of
from flower_dp.clients import FlatModel, client_app
from flower_dp.clients.node_client import HostingClient
from flower_dp.clients.training.devices import default_device


def client_fn(context: Context) -> HostingClient:
    """Return the node's clients, on the device's own terms; each process makes them once and keeps them during a run.

    Raises:
        ValueError: for an invalid run-config or node-config, or a run that the device's own settings exclude.
    """
    own = own_settings(context.run_config, context.node_config, dealt=True)
    kept, key = kept_of(context.run_config), (config_of(own), *hosted(context.node_config))
    return kept.once(key, lambda: _client(kept, *key))


def _client(kept: Kept, own: Config, part: int, parts: int) -> HostingClient:
    run = ParsedRunConfig.of(dict(own))
    model = kept.once(("model", own), lambda: FlatModel(run.model(), default_device()))
    clients = kept.once(("records", own), lambda: deal(own).clients.on(default_device()))
    return run.client(model, clients.part(part, parts), sizes_of(dict(own)))


app = client_app(client_fn)
