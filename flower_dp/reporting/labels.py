"""Labels of runs: the settings that tell runs apart."""

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
# Settings of the amount of noise, by the last part of their keys: a line of accuracy over epsilon joins runs that differ in them.
NOISE = ("epsilon", "client-epsilons", "paper-epsilon", "noise-multiplier", "target-epsilon", "delta")
# Settings whose value names a table of settings; only that table is read.
_CHOICES = ("method", "task")
_MAX_SETTINGS = 4  # settings in a label, if fewer tell the runs apart
_WIDTH = 46  # of a label, in characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """The differences of configurations.

    Attributes:
        labels: labels, one for each configuration.
        differ: settings that differ and that the methods read, by key; one table for each configuration.
        left_out: those of these settings that are in no label.
    """

    labels: list[str]
    differ: list[dict[str, Any]]
    left_out: list[str]


def labels_of(configs: Sequence[Config]) -> list[str]:
    """Return a label for each configuration, made of the settings in which configurations differ."""
    return legend_of(configs).labels


def legend_of(configs: Sequence[Config], first: Sequence[str] = ()) -> Legend:
    """Return the differences of configurations.

    Many settings may differ, as between presets of two methods. Labels then have only as many settings as tell the configurations
    apart.

    Args:
        configs: settings by run-config key, of flower-dp's app or of any other app.
        first: keys that come first in a label, even if they do not differ.
    """
    if len(configs) == 1 and not first:
        return Legend(labels=[str(configs[0].get("method", "all runs"))], differ=[{}], left_out=[])
    configs = [read_settings(config) for config in configs]
    tables = {str(config[key]) for config in configs for key in _CHOICES if key in config}
    configs = [_without_others(config, tables) for config in configs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differ = [key for key in keys if any(setting(key, config) != setting(key, configs[0]) for config in configs)]
    # Leave out keys that some runs lack (those of an older version), if the other keys tell the runs apart.
    known = [key for key in differ if all(key in config for config in configs)]
    shown = next((keys for keys in (known, differ) if _apart(keys, configs)), differ)
    # A key of one method's table that has one value in all its runs is implied by the method.
    telling = [key for key in shown if len({setting(key, config) for config in configs if key in config}) > 1]
    if len(shown) > _MAX_SETTINGS and _apart(telling, configs):
        shown = telling
    differing = telling or shown
    if len(shown) > _MAX_SETTINGS:
        shown = _fewest(shown, configs)
    named = {find(key, config) for key in first for config in configs}
    shown = [*first, *(key for key in shown if key not in named)]
    return Legend(
        labels=[
            ", ".join(setting(key, config) for key in shown if find(key, config) is not None or _table(key) not in tables)
            for config in configs
        ],
        differ=[{key: config[key] for key in differing if key in config} for config in configs],
        left_out=[key for key in differing if key not in shown and key not in named],
    )


def read_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a run reads, without those in which repetitions differ."""
    unread = _unread()(config) if "method" in config else set()
    return {key: value for key, value in config.items() if key not in unread and key not in REPEATED}


def find(key: str, config: Config) -> str | None:
    """Return a setting's key in a configuration: the key itself, or that in the method's table; None if there is no such key."""
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
    """Return the function that names the settings that a run of flower-dp's app leaves unread; without torch, none are."""
    try:
        return cast("Callable[[Config], set[str]]", own_module("unread_settings").unread)
    except ImportError:
        return lambda config: set()


def _fewest(keys: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return few keys that tell the configurations apart as all keys do: method and task, then greedily the most telling ones."""
    chosen = [key for key in keys if key in _CHOICES]
    while _count(chosen, configs) < _count(keys, configs):
        chosen.append(max(keys, key=lambda key: _count([*chosen, key], configs)))
    return [key for key in keys if key in chosen]


def _apart(keys: Sequence[str], configs: Sequence[Config]) -> bool:
    return _count(keys, configs) == len(configs)


def _count(keys: Sequence[str], configs: Sequence[Config]) -> int:
    """Return the number of configurations that these keys tell apart."""
    return len({tuple(setting(key, config) for key in keys) for config in configs})


def _without_others(config: Config, tables: set[str]) -> dict[str, Any]:
    """Return a configuration without the tables of methods and tasks that only other runs use."""
    used = {config.get(key) for key in _CHOICES}
    return {key: value for key, value in config.items() if _table(key) not in tables or _table(key) in used}


def _table(key: str) -> str:
    """Return the table of a setting, such as `dp-fedsam`; empty for a common setting."""
    return key.rpartition(".")[0]
