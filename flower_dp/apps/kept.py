"""What a process keeps of a run between messages: each node's clients, and what all its nodes share."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any

from flower_dp.apps.records import Config, config_of
from flower_dp.clients.node_client import NodeClient


class Kept:
    """The clients of the nodes that a process has served, however many, and one model for all: what is traced for it is kept."""

    def __init__(self) -> None:
        self._clients: dict[Hashable, NodeClient] = {}
        self._shared: dict[Hashable, Any] = {}

    def client(self, key: Hashable, make: Callable[[], NodeClient]) -> NodeClient:
        """Return a node's client, made when it is first asked for."""
        if key not in self._clients:
            self._clients[key] = make()
        return self._clients[key]

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what nodes with the same key share, made when it is first asked for."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


def kept_of(run_config: Mapping[str, Any], *functions: Hashable) -> Kept:
    """Return what is kept of a run with these settings and functions; another run makes it be forgotten."""
    return _kept(config_of(run_config), functions)


@lru_cache(maxsize=1)
def _kept(run_config: Config, functions: tuple[Hashable, ...]) -> Kept:
    return Kept()
