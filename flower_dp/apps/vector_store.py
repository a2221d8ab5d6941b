"""Objects that a process keeps between messages of a run: each node's clients, and the model that all its nodes share."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from flower_dp.apps.records import Config, config_of

T = TypeVar("T")


class Kept:
    """The clients of all nodes that a process has served, and one model for all, so that its traced programs are kept."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a key's object; `make` makes it at the first call."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


def kept_of(run_config: Mapping[str, Any], *functions: Hashable) -> Kept:
    """Return the store of a run with these settings and functions; a call for another run drops it."""
    return _kept(config_of(run_config), functions)


@lru_cache(maxsize=1)
def _kept(run_config: Config, functions: tuple[Hashable, ...]) -> Kept:
    return Kept()
