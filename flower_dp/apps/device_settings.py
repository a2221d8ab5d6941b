"""What a device sets itself: its node-config wins over the run-config, which the server writes."""

from collections.abc import Mapping
from typing import Any

from flower_dp.apps.methods import defaults
from flower_dp.apps.settings import DEALT, FUNCTIONS, SAMPLINGS
from flower_dp.apps.tasks import TASKS
from flower_dp.core import checks
from flower_dp.methods import METHODS

# What decides how much noise a client adds itself, where clients share the noise of a sum.
_SHARED = ("sampling", "sampling-rate", "cohort-size")


def sets_anything(node_config: Mapping[str, Any]) -> bool:
    """Tell whether a device's node-config has any setting of the app; it then protects itself."""
    return any(map(_is_setting, node_config))


def own_settings(run_config: Mapping[str, Any], node_config: Mapping[str, Any], *, dealt: bool = False) -> dict[str, Any]:
    """Return a run-config as this node's clients take it.

    A device that sets nothing takes all of it. One that sets anything has each of its keys as it says, and besides

    - sends no training metrics and takes part in no private evaluation, unless it says so itself;
    - hosts client `partition-id` of `num-partitions` clients, and no other, unless it sets `num-clients`;
    - has the records that it says, and takes the server's word on none of `DEALT`;
    - for a method in which clients share the noise, knows from itself who is drawn.

    A device that sets anything of a method sets its whole table: what it leaves out has the app's default, not the server's
    value, for one value can undo another (a delta near 1, budgets for single clients, a weaker neighboring relation). It
    then takes part in no method for which it has set nothing.

    Args:
        run_config: every setting of the app.
        node_config: may have any of them, under the same key: `fedsgd-dpc.epsilon`.
        dealt: whether clients have records of a task that the app deals to them, and not those of somebody's own function.

    Raises:
        ValueError: if the run's method is none of those that the device has settings for, or if the server has set what only the
            device may decide, naming it.

    Example:
        >>> from flower_dp.apps.device_settings import own_settings
        >>> run_config = {"method": "nbafl", "nbafl.paper-epsilon": 50.0, "nbafl.delta": 0.9}
        >>> own = own_settings(run_config, {"partition-id": 0, "nbafl.paper-epsilon": 2.0})
        >>> own["nbafl.paper-epsilon"], own["nbafl.delta"]
        (2.0, 0.01)
    """
    if not sets_anything(node_config):
        return dict(run_config)
    tables = {table: {key for key in node_config if key.startswith(f"{table}.")} for table in METHODS}
    mine = sorted(table for table in METHODS if tables[table])
    method = node_config.get("method", run_config["method"])
    if mine and method not in mine:
        raise ValueError(f"method={method!r}: this device's node-config has settings for {', '.join(mine)}, and it runs no other")
    table = _defaults_of(method) if mine else {}
    # Of what sends more than noised updates, a device has what it sets itself alone.
    config = {**run_config, **table, **_defaults_of("private-evaluation"), "report-client-metrics": False}
    others = {key for other in mine if other != method for key in tables[other]}  # which this run does not read
    config |= {key: value for key, value in node_config.items() if _is_setting(key) and key not in others}
    _check_records(config, node_config, DEALT if dealt else ())
    epsilon = config.get(f"{method}.epsilon")
    if f"{method}.noise-multiplier" in table and isinstance(epsilon, int | float) and epsilon:
        why = f"{method}.epsilon={epsilon:g}: the noise would follow from the number of rounds, which the server decides"
        raise ValueError(f"{why}; set {method}.noise-multiplier in its node-config (flower-dp calibrate computes it)")
    if f"{method}.placement" in table and config[f"{method}.placement"] == "distributed":
        _check_defaults(config, node_config, _SHARED, "how much noise this device adds is not the server's to decide")
    return config


def hosted(node_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return which clients a node hosts: of all clients the one at the first number, and every second-number-th after it.

    Raises:
        ValueError: if the node-config does not say, naming the key.
    """
    for key in ("partition-id", "num-partitions"):
        if key not in node_config:
            raise ValueError(f"{key}: is missing from the node-config; it says which clients this node hosts")
    part, parts = (checks.integer(key, node_config[key]) for key in ("partition-id", "num-partitions"))
    if not 0 <= part < parts:
        raise ValueError(f"partition-id={part}: must be 0 to {parts - 1}, below num-partitions={parts}")
    return part, parts


def _check_records(config: Mapping[str, Any], node_config: Mapping[str, Any], dealt: tuple[str, ...]) -> None:
    """Refuse a server's word on which clients a device hosts, and on which records they have.

    A budget is each client's. With more clients, or with other records in each, a record could be in many budgets.
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
        same = (default, SAMPLINGS[0]) if key == "sampling" else (default,)  # where noise is shared, "" is the first
        if key not in node_config and config.get(key, default) not in same:
            raise ValueError(f"{key}={config[key]!r}: {why}; set {key} in its node-config (the app's default is {default!r})")


def _is_setting(key: str) -> bool:
    prefix, dot, _ = key.partition(".")
    return key in defaults() or key in FUNCTIONS or bool(dot and prefix in (*METHODS, *TASKS, "private-evaluation"))


def _defaults_of(table: str) -> dict[str, Any]:
    return {key: value for key, value in defaults().items() if key.startswith(f"{table}.")}
