"""Labels of runs: the settings that tell them apart."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from flower_dp.running.apps import own_module

Config = Mapping[str, Any]

# Keys in which repetitions of the same run may differ.
REPEATED = ("seed", "output-dir", "resume", "server-ledger")
# Settings that say how much noise there is, by the last part of their keys: a line of accuracy against epsilon goes through them.
NOISE = ("epsilon", "client-epsilons", "paper-epsilon", "noise-multiplier", "target-epsilon", "delta")
# Settings whose values name the table of settings that is read.
_CHOICES = ("method", "task")
_MOST = 4  # settings in a label, if fewer tell the runs apart
_WIDTH = 46  # of a label, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """What tells configurations apart.

    Attributes:
        labels: one for each configuration.
        differ: the settings that differ, and that the methods read, by their keys; one table for each configuration.
        left_out: those of them that are in no label.
    """

    labels: list[str]
    differ: list[dict[str, Any]]
    left_out: list[str]


def labels_of(configs: Sequence[Config]) -> list[str]:
    """Return a label for each configuration, made of the keys in which they differ."""
    return legend_of(configs).labels


def legend_of(configs: Sequence[Config], first: Sequence[str] = ()) -> Legend:
    """Return what tells configurations apart.

    Many settings may differ, as between two methods with presets of their own. Labels then have the fewest of them that tell the
    configurations apart.

    Args:
        configs: settings by run-config key, those of flower-dp's app or of any other.
        first: keys that are in a label first, whether they differ or not.
    """
    if len(configs) == 1 and not first:
        return Legend(labels=[str(configs[0].get("method", "all runs"))], differ=[{}], left_out=[])
    configs = [what_is_read(config) for config in configs]
    tables = {str(config[key]) for config in configs for key in _CHOICES if key in config}
    configs = [_without_others(config, tables) for config in configs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differ = [key for key in keys if any(setting(key, config) != setting(key, configs[0]) for config in configs)]
    # Keys that some runs do not have (those of an older version) are left out, if the other keys distinguish the runs.
    known = [key for key in differ if all(key in config for config in configs)]
    shown = next((some for some in (known, differ) if _apart(some, configs)), differ)
    # A key of one method's table that has one value in all its runs is told by the method.
    telling = [key for key in shown if len({setting(key, config) for config in configs if key in config}) > 1]
    if len(shown) > _MOST and _apart(telling, configs):
        shown = telling
    differing = telling or shown
    if len(shown) > _MOST:
        shown = _fewest(shown, configs)
    named = {find(key, config) for key in first for config in configs}
    shown = [*first, *(key for key in shown if key not in named)]
    return Legend(
        labels=[
            ", ".join(setting(key, one) for key in shown if find(key, one) is not None or _table(key) not in tables)
            for one in configs
        ],
        differ=[{key: config[key] for key in differing if key in config} for config in configs],
        left_out=[key for key in differing if key not in shown and key not in named],
    )


def what_is_read(config: Config) -> dict[str, Any]:
    """Return the settings that a run reads, but for those in which repetitions differ."""
    unread = _unread()(config) if "method" in config else set()
    return {key: value for key, value in config.items() if key not in unread and key not in REPEATED}


def find(key: str, config: Config) -> str | None:
    """Return the key by which a configuration has a setting, by itself or in the table of its method; None: not at all."""
    return next((name for name in (key, f"{config.get('method')}.{key}") if name in config), None)


def setting(key: str, config: Config) -> str:
    """Return `key=value`."""
    if (name := find(key, config)) is None:
        return f"{key} not set"
    value = config[name]
    if isinstance(value, bool) or value == "":
        return f"{key}={json.dumps(value)}"
    return f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}"


def wrapped(text: str) -> list[str]:
    """Return the lines of a wrapped label."""
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False) or [""]


@cache
def _unread() -> Callable[[Config], set[str]]:
    """Return the function that knows what the methods of flower-dp's app read; without torch everything counts as read."""
    try:
        return cast("Callable[[Config], set[str]]", own_module("unread_settings").unread)
    except ImportError:
        return lambda config: set()


def _fewest(keys: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return keys that tell the configurations apart as all do: method and task, then each time the one that tells most."""
    chosen = [key for key in keys if key in _CHOICES]
    while _count(chosen, configs) < _count(keys, configs):
        chosen.append(max(keys, key=lambda key: _count([*chosen, key], configs)))
    return [key for key in keys if key in chosen]


def _apart(keys: Sequence[str], configs: Sequence[Config]) -> bool:
    return _count(keys, configs) == len(configs)


def _count(keys: Sequence[str], configs: Sequence[Config]) -> int:
    """Return how many configurations some keys tell apart."""
    return len({tuple(setting(key, config) for key in keys) for config in configs})


def _without_others(config: Config, tables: set[str]) -> dict[str, Any]:
    """Return a configuration without the tables of methods and tasks that other runs have chosen, and this one has not."""
    own = {config.get(key) for key in _CHOICES}
    return {key: value for key, value in config.items() if _table(key) not in tables or _table(key) in own}


def _table(key: str) -> str:
    """Return the table of a setting, such as `dp-fedsam`; empty for a common one."""
    return key.rpartition(".")[0]
