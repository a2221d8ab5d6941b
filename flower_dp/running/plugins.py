"""Plugins: functions that an app's pyproject.toml names under [tool.flower-dp], as "module:function"."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flower_dp.core import dp_events
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running.apps import App, Target, own_app


class PluginError(ValueError):
    """An error of an app that names a function that can't be imported."""


@contextmanager
def load_plugin(app: App, reference: str) -> Iterator[Callable[..., Any]]:
    """Yield a function of an app. Within this context the app's modules can be imported.

    Raises:
        PluginError: if there is no such function, or it needs a package that is not installed.
    """
    module, _, name = reference.partition(":")
    sys.path.insert(0, str(app.folder))
    try:
        try:
            function = getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError, ValueError) as error:
            raise PluginError(f"{reference}: {error}; install its dependencies with pip install 'flower-dp[app]'") from None
        yield function
    finally:
        sys.path.remove(str(app.folder))


def statement_of(target: Target) -> PrivacyStatement:
    """Return the statement that a run will end with.

    Raises:
        ValueError: if its app has no `cost`.
    """
    statement: PrivacyStatement = _called(target, "cost")
    return statement


def event_against_outsiders(target: Target) -> tuple[dp_events.DpEvent, PrivacyStatement]:
    """Return the event of a whole run against outsiders, and the run's statement.

    Raises:
        ValueError: if the app's runs can't be planned here, or if every device has a ledger of its own in the run's method.
    """
    if not (target.app.own or target.app.built):
        raise ValueError(
            f"{target.app.name}: the event of its runs is not known before them; it is known for apps of `flower_dp.app`"
        )
    planned: tuple[dp_events.DpEvent, PrivacyStatement] = _called(target, "outside")
    return planned


def _called(target: Target, name: str) -> Any:
    """Call `cost`, or a function of the same module, for a run."""
    # An app of `flower_dp.app` has the settings of flower-dp's own.
    app = own_app() if target.app.built else target.app
    if not app.cost:
        raise ValueError(
            f"{app.name}: its pyproject.toml names no function `cost` under [tool.flower-dp]; in its place describe what its "
            "strategy releases, as --noise-multiplier 1 --num-rounds 50 --delta 1e-5"
        )
    reference = app.cost if name == "cost" else f"{app.cost.partition(':')[0]}:{name}"
    with load_plugin(app, reference) as function:
        return function(target.config, own_model=True) if target.app.built else function(target.config)
