"""Functions that an app names under [tool.flower-dp] of its pyproject.toml, as "module:function"; what they say a run costs."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flower_dp.core import dp_events
from flower_dp.privacy.statement import PrivacyStatement
from flower_dp.running.apps import App, Target, own_app


class PluginError(ValueError):
    """An app names a function that can't be imported."""


@contextmanager
def load_plugin(app: App, reference: str) -> Iterator[Callable[..., Any]]:
    """Yield a function of an app, whose modules can be imported within this context.

    Raises:
        PluginError: the function is not there, or needs a package that is not installed.
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
        ValueError: its app does not say what a run costs.
    """
    statement: PrivacyStatement = _called(target, "cost")
    return statement


def event_against_outsiders(target: Target) -> tuple[dp_events.DpEvent, PrivacyStatement]:
    """Return the event of a whole run against those who are no clients, and the run's statement.

    Raises:
        ValueError: for an app whose runs nobody here can plan, or a method in which every device has a ledger of its own.
    """
    if not (target.app.own or target.app.built):
        raise ValueError(
            f"{target.app.name}: what its runs cost is not known before them; it is known of apps of `flower_dp.app`"
        )
    planned: tuple[dp_events.DpEvent, PrivacyStatement] = _called(target, "outside")
    return planned


def _called(target: Target, name: str) -> Any:
    """Return what `cost`, or a function beside it, says of a run.

    An app of `flower_dp.app` has the settings of flower-dp's own.
    """
    app = own_app() if target.app.built else target.app
    if not app.cost:
        raise ValueError(
            f"{app.name}: its pyproject.toml names no function `cost` under [tool.flower-dp]; in its place describe what its "
            "strategy releases, as --noise-multiplier 1 --num-rounds 50 --delta 1e-5"
        )
    reference = app.cost if name == "cost" else f"{app.cost.partition(':')[0]}:{name}"
    with load_plugin(app, reference) as function:
        return function(target.config, own_model=True) if target.app.built else function(target.config)
