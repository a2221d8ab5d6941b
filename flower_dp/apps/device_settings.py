"""A device's own settings: its node-config takes precedence over the run-config, which the server writes."""

import difflib
from collections.abc import Mapping
from typing import Any

from flower_dp.apps.methods import defaults
from flower_dp.apps.settings import DEALT, FUNCTIONS, SAMPLING_KEYS, SAMPLINGS
from flower_dp.apps.tasks import TASKS
from flower_dp.core import checks
from flower_dp.methods import METHODS

# Keys of a node-config that are not settings, and resemble some.
_NODE_KEYS = ("partition-id", "num-partitions", "ledger-path")
# Similarity in [0, 1] (`difflib`) from which a key is taken for a misspelled setting.
_ALIKE = 0.8


def sets_anything(node_config: Mapping[str, Any]) -> bool:
    """Return whether a device's node-config has any setting of the app; the device then protects itself."""
    return any(map(_is_setting, node_config))


def own_settings(run_config: Mapping[str, Any], node_config: Mapping[str, Any], *, dealt: bool = False) -> dict[str, Any]:
    """Return the run-config that this node's clients use.

    A device that sets nothing uses the server's run-config. A device that sets any key uses its own values for its keys. It also

    - sends no training metrics and takes part in no private evaluation, unless it sets so itself;
    - hosts only client `partition-id` of `num-partitions` clients, unless it sets `num-clients`;
    - decides its own records, and accepts no value of the server for any key of `DEALT`;
    - with shared noise, accepts no value of the server for the sampling of clients, if it sets a key of the method.

    A device that sets any key of a method sets its whole table: keys that it leaves out get the app's default, not the server's
    value. Otherwise one value could undo another: a delta near 1, budgets for single clients, a weaker neighboring relation. The
    device then takes part in no method for which it has set nothing.

    Args:
        run_config: all settings of the app.
        node_config: any of these settings, under the same key, such as `fedsgd-dpc.epsilon`.
        dealt: whether the app deals a task's records to clients; False if a user's own function returns them.

    Raises:
        ValueError: naming a key: a misspelled setting of the node-config, or one that the server has set and only the device may
            decide. Or if the device has settings for other methods than the run's.

    Example:
        >>> from flower_dp.apps.device_settings import own_settings
        >>> run_config = {"method": "nbafl", "nbafl.paper-epsilon": 50.0, "nbafl.delta": 0.9}
        >>> own = own_settings(run_config, {"partition-id": 0, "nbafl.paper-epsilon": 2.0})
        >>> own["nbafl.paper-epsilon"], own["nbafl.delta"]
        (2.0, 0.01)
    """
    _check_misspelled(node_config)
    if not sets_anything(node_config):
        return dict(run_config)
    tables = {table: {key for key in node_config if key.startswith(f"{table}.")} for table in METHODS}
    mine = sorted(table for table in METHODS if tables[table])
    method = node_config.get("method", run_config["method"])
    if mine and method not in mine:
        raise ValueError(f"method={method!r}: this device's node-config has settings for {', '.join(mine)}, and runs only these")
    table = _defaults_of(method) if mine else {}
    # Metrics and evaluations send more than noised updates, so only the device itself can turn them on.
    config = {**run_config, **table, **_defaults_of("private-evaluation"), "report-client-metrics": False}
    others = {key for other in mine if other != method for key in tables[other]}  # this run does not read them
    config |= {key: value for key, value in node_config.items() if _is_setting(key) and key not in others}
    _check_records(config, node_config, DEALT if dealt else ())
    epsilon = config.get(f"{method}.epsilon")
    if f"{method}.noise-multiplier" in table and isinstance(epsilon, int | float) and epsilon:
        why = f"{method}.epsilon={epsilon:g}: the noise would follow from the number of rounds, which the server decides"
        raise ValueError(f"{why}; set {method}.noise-multiplier in its node-config (flower-dp calibrate computes it)")
    if f"{method}.noise" in table:  # one release covers the whole run
        why = "how often this device takes part, and so what the noise is worth, is not the server's to decide"
        if not node_config.get("min-separation"):
            raise ValueError(f"min-separation: {why}; set min-separation in its node-config, to 1 or more")
        _check_defaults(config, node_config, ("num-rounds", "max-participations"), why)
    if f"{method}.placement" in table and config[f"{method}.placement"] == "distributed":
        _check_defaults(config, node_config, SAMPLING_KEYS, "how much noise this device adds is not the server's to decide")
    return config


def hosted(node_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return (partition-id, num-partitions): the node hosts every num-partitions-th client, from number partition-id on.

    Raises:
        ValueError: if the node-config lacks a key or its value is out of range, naming the key.
    """
    for key in ("partition-id", "num-partitions"):
        if key not in node_config:
            raise ValueError(f"{key}: is missing from the node-config; it decides which clients this node hosts")
    part, parts = (checks.integer(key, node_config[key]) for key in ("partition-id", "num-partitions"))
    if not 0 <= part < parts:
        raise ValueError(f"partition-id={part}: must be 0 to {parts - 1}, below num-partitions={parts}")
    return part, parts


def _check_records(config: Mapping[str, Any], node_config: Mapping[str, Any], dealt: tuple[str, ...]) -> None:
    """Refuse a server's decision on which clients a device hosts, and on which records they have.

    Each client has its own budget. With more clients, or with other records in each, one record could be charged to many budgets.
    """
    parts = node_config.get("num-partitions")
    number = config.get("num-clients", parts)
    if "num-clients" not in node_config and parts is not None and number != parts:
        why = f"this device has settings of its own, and hosts one client of num-partitions={parts}"
        raise ValueError(f"num-clients={number!r}: {why}; set num-clients in its node-config if it hosts others")
    _check_defaults(config, node_config, dealt, "which records this device's clients have is not the server's to decide")


def _check_defaults(config: Mapping[str, Any], node_config: Mapping[str, Any], keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        default = defaults()[key]
        same = (default, SAMPLINGS[0]) if key == "sampling" else (default,)  # with shared noise "" means the first
        if key not in node_config and config.get(key, default) not in same:
            raise ValueError(f"{key}={config[key]!r}: {why}; set {key} in its node-config (the app's default is {default!r})")


def _check_misspelled(node_config: Mapping[str, Any]) -> None:
    """Refuse an unknown key that resembles a setting: ignored as another app's, it would leave the server's value in force."""
    names = {name.rpartition(".")[2]: name for name in defaults() if "." in name}
    common = [name for name in defaults() if "." not in name]
    for key in node_config:
        if _is_setting(key) or key in _NODE_KEYS:
            continue
        close = [names[name]] if (name := key.rpartition(".")[2]) != key and name in names else []
        if close := close or difflib.get_close_matches(key, common, n=1, cutoff=_ALIKE):
            raise ValueError(
                f"{key}: unknown setting in this device's node-config; did you mean {close[0]}? Remove or correct it"
            )


def _is_setting(key: str) -> bool:
    prefix, dot, _ = key.partition(".")
    return key in defaults() or key in FUNCTIONS or bool(dot and prefix in (*METHODS, *TASKS, "private-evaluation"))


def _defaults_of(table: str) -> dict[str, Any]:
    return {key: value for key, value in defaults().items() if key.startswith(f"{table}.")}
