"""Modules of an app: loaded from its folder, and again once they have changed. A process may outlive a run that imported them."""

import contextlib
import importlib
import operator
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

_PACKAGE = str(Path(__file__).resolve().parents[1])
# The ServerApps that `flower_dp.app` has made.
BUILT: WeakSet[Any] = WeakSet()
# The ServerApp that was loaded last, with what loaded it; its modules are there as long as it is.
_served: dict[tuple["InFolder", int], Any] = {}
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

    @property
    def changed(self) -> int:
        """When the module's file has changed, in nanoseconds since 1970; 0 without one."""
        module = Path(self.folder).joinpath(*self.reference.partition(":")[0].split("."))
        return max(map(_changed, (str(module.with_suffix(".py")), str(module / "__init__.py"))))

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


def served(place: InFolder) -> Any:
    """Return an app's ServerApp, loaded once, until its folder is forgotten or another one is loaded. Nothing is compiled there.

    Raises:
        ValueError: as `InFolder`.
        Exception: what the app's modules raise.
    """
    key = place, place.changed
    if key not in _served:
        for other, _ in list(_served):
            forget(other.folder)
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # somebody else's folder stays as it is
        try:
            _served[key] = place()
        except BaseException:
            forget(place.folder)
            raise
        finally:
            sys.dont_write_bytecode = before
    return _served[key]


def is_built(place: InFolder) -> bool:
    """Return whether `flower_dp.app` has made a ServerApp; not of one that can't be loaded, as who runs it will see."""
    return _is_built(place, place.changed)


# A sweep asks for each of its runs.
@lru_cache(maxsize=64)
def _is_built(place: InFolder, changed: int) -> bool:
    with suppress(Exception, SystemExit), contextlib.chdir(place.folder), contextlib.redirect_stdout(sys.stderr):
        return served(place) in BUILT
    return False


def forget(folder: str) -> None:
    """Let the modules of a folder be imported again, and nothing else be imported from it.

    A virtual environment in the folder stays: most packages can't be imported twice.
    """
    for key in [one for one in _served if one[0].folder == folder]:
        del _served[key]
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
    named = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    own = [
        (name, str(Path(file).resolve()))
        for name, file in named.items()
        # To resolve those of site-packages, thousands, takes half a second.
        if isinstance(file, str) and file.endswith(".py") and "/site-packages/" not in file
        if name not in ("__main__", "__mp_main__")
    ]
    return [(name, file) for name, file in own if not file.startswith(installed) and "/site-packages/" not in file]
