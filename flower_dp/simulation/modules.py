"""Modules of an app: loaded from its folder, and again after they have changed. A worker outlives the run that imported them."""

import importlib
import operator
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flower_dp
from flower_dp.running.apps import App, own_module

_PACKAGE = str(Path(flower_dp.__file__).resolve().parent)
# When `forget_changed` was called last, in nanoseconds since 1970.
_looked = time.time_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class InFolder:
    """Returns what an app's pyproject.toml names as "module:name", from the modules in the app's folder.

    Modules of the folder that are there already are imported again: they may be those of an earlier run. "." is the folder in
    which the call is made.

    Raises:
        ValueError: on a call, if the name is not there, or has another type.
    """

    folder: str
    key: str
    reference: str
    type_name: str

    def __call__(self) -> Any:
        """Return it."""
        folder = str(Path(self.folder).absolute())
        forget(folder)
        sys.path.insert(0, folder)
        module, _, name = self.reference.partition(":")
        if not module or not name:
            raise ValueError(f"{self.key}={self.reference!r}: must be 'module:name' in {folder}")
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise  # a package that the app needs is not installed
            raise ValueError(f"{self.key}={self.reference!r}: {error}; must be 'module:name' in {folder}") from None
        try:
            found = operator.attrgetter(name)(imported)
        except AttributeError:
            raise ValueError(f"{self.key}={self.reference!r}: {module} has no {name!r}") from None
        if type(found).__name__ != self.type_name:
            raise ValueError(f"{self.key}={self.reference!r}: is a {type(found).__name__}: must be a {self.type_name}")
        return found


def client_of(app: App, *, away: bool) -> Callable[[], Any]:
    """Return what loads an app's ClientApp in a worker: from the app's folder, or on a cluster from what every machine has."""
    if not away:
        return components(app)[0]
    return own_client_app if app.own else replace(components(app)[0], folder=".")


def components(app: App) -> tuple[InFolder, InFolder]:
    """Return what loads an app's ClientApp and ServerApp."""
    folder = str(app.folder)
    return (
        InFolder(folder=folder, key="clientapp", reference=app.client, type_name="ClientApp"),
        InFolder(folder=folder, key="serverapp", reference=app.server, type_name="ServerApp"),
    )


def own_client_app() -> Any:
    """Return the ClientApp of flower-dp's own app."""
    return own_module("client_app").app


def forget(folder: str) -> None:
    """Let the modules of a folder be imported again, and nothing else be imported from it.

    A virtual environment in the folder stays: most packages can't be imported twice.
    """
    place = str(Path(folder).resolve()) + "/"
    for name, file in _own_files():
        if file.startswith(place):
            del sys.modules[name]
    while folder in sys.path:
        sys.path.remove(folder)
    importlib.invalidate_caches()


def forget_changed() -> None:
    """Let modules be imported again if one of them has changed on disk since the last call; those of installed packages stay."""
    global _looked
    since, _looked = _looked, time.time_ns()
    own = _own_files()
    if any(_changed(file) > since for _, file in own):
        for name, _ in own:
            del sys.modules[name]
        importlib.invalidate_caches()


def _changed(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:  # it is gone
        return 0


def _own_files() -> list[tuple[str, str]]:
    """Return the Python modules that are neither installed nor the program itself, with their files."""
    installed = tuple(f"{place}/" for place in (sys.prefix, sys.base_prefix, sys.exec_prefix, _PACKAGE))
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and name not in ("__main__", "__mp_main__"):
            if "/site-packages/" in file:
                continue  # thousands, which take half a second to resolve
            with suppress(OSError):
                found.append((name, str(Path(file).resolve())))
    return [(name, file) for name, file in found if not file.startswith(installed) and "/site-packages/" not in file]
