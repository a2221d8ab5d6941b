"""Functions that an app names under [tool.flower-dp] in its pyproject.toml, as "module:function"; commands call them."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flower_dp.running.apps import App


class PluginError(ValueError):
    """An app names a function that can't be imported."""


@contextmanager
def loaded(app: App, reference: str) -> Iterator[Callable[..., Any]]:
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
