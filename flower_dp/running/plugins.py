"""Functions that an app names under [tool.flower-dp] in its pyproject.toml, as "module:function"; commands call them."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flower_dp.running.apps import App


class PluginError(ValueError):
    """An app names a function that can't be imported."""


@contextlib.contextmanager
def loaded(app: App, reference: str) -> Iterator[Callable[..., Any]]:
    """Yield a function of an app, whose modules can be imported within this context.

    Raises:
        PluginError: the function is not there, or needs a package that is not installed.
    """
    module, _, name = reference.partition(":")
    with _importable(app.folder):
        try:
            function = getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError, ValueError) as error:
            raise PluginError(f"{reference}: {error}; install its dependencies with pip install 'flower-dp[app]'") from None
        yield function


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
