"""What a process keeps of a run between messages: each node's clients, and what all its nodes share."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from flower_dp.apps.records import Config, config_of

T = TypeVar("T")


class Kept:
    """The clients of the nodes that a process has served, however many, and one model for all: what is traced for it is kept."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what belongs to a key, made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


def kept_of(run_config: Mapping[str, Any], *functions: Hashable) -> Kept:
    """Return what is kept of a run with these settings and functions; another run makes it be forgotten."""
    return _kept(config_of(run_config), functions)


@lru_cache(maxsize=1)
def _kept(run_config: Config, functions: tuple[Hashable, ...]) -> Kept:
    return Kept()
