"""What a device sets itself: its node-config wins over the run-config, which the server writes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from apps.evaluation import Evaluation
from apps.methods import METHODS, module_of
from apps.settings import key_of

_METRICS = "report-client-metrics"


def own_settings(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run-config as this node's clients take it.

    A device that sets anything of a method sets its whole table: what it leaves out has the app's default, not the server's
    value, for one value can undo another (a delta near 1, budgets for single clients, a weaker neighbouring relation). It
    then takes part in no method for which it has set nothing. A device that sets anything of a method or of the table
    `evaluation` takes part in private evaluations by its own settings alone. `report-client-metrics` is the device's too, if it
    has that.

    Args:
        run_config: every setting of the app.
        node_config: may have settings of methods, under their keys in the run-config: `fedsgd-dpc.epsilon`.

    Raises:
        ValueError: if the run's method is none of those that the device has settings for.

    Example:
        >>> from apps.device import own_settings
        >>> run_config = {"method": "nbafl", "nbafl.epsilon": 50.0, "nbafl.delta": 0.9}
        >>> own = own_settings(run_config, {"partition-id": 0, "nbafl.epsilon": 2.0})
        >>> own["nbafl.epsilon"], own["nbafl.delta"]
        (2.0, 0.01)
    """
    tables = {method: _table(node_config, method) for method in METHODS}
    mine = sorted(method for method, table in tables.items() if table)
    config, method = dict(run_config), run_config["method"]
    if mine and method not in mine:
        raise ValueError(f"method={method!r}: this device's node-config has settings for {', '.join(mine)}, and it runs no other")
    if mine:
        defaults = {f"{method}.{key_of(field.name)}": field.default for field in fields(module_of(method).Own)}
        config |= defaults | tables[method]
    evaluation = _table(node_config, "evaluation")
    if mine or evaluation:
        # A device that protects itself evaluates by its own settings, which are none where it sets none.
        config |= {f"evaluation.{key_of(field.name)}": field.default for field in fields(Evaluation)} | evaluation
    if _METRICS in node_config:
        config[_METRICS] = node_config[_METRICS]
    return config


def _table(node_config: Mapping[str, Any], method: str) -> dict[str, Any]:
    return {key: value for key, value in node_config.items() if key.startswith(f"{method}.")}
