"""Modules of an app: imported from its folder, and again after they change, since a process may outlive several runs."""

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
# ServerApps that `flower_dp.app` has made.
BUILT: WeakSet[Any] = WeakSet()
# The last loaded ServerApp, by its loader and the time of its file. Its modules stay imported as long as it is here.
_served: dict[tuple["InFolder", int], Any] = {}
# The time of the last call of `forget_changed`, in nanoseconds since 1970.
_looked = time.time_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class InFolder:
    """The loader of an object that an app's pyproject.toml names as "module:name".

    A call imports the folder's modules again, since an earlier run may have imported other ones. "." is the working directory of
    the call.

    Raises:
        ValueError: on a call, if the folder has no such object, or it has another type.
    """

    folder: str
    key: str
    reference: str
    type_name: str

    @property
    def changed(self) -> int:
        """The time of the last change of the module's file, in nanoseconds since 1970; 0 without a file."""
        module = Path(self.folder).joinpath(*self.reference.partition(":")[0].split("."))
        return max(map(_changed, (str(module.with_suffix(".py")), str(module / "__init__.py"))))

    def __call__(self) -> Any:
        """Return the object."""
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
            component = operator.attrgetter(name)(imported)
        except AttributeError:
            raise ValueError(f"{self.key}={self.reference!r}: {module} has no {name!r}") from None
        if type(component).__name__ != self.type_name:
            raise ValueError(f"{self.key}={self.reference!r}: is a {type(component).__name__}: must be a {self.type_name}")
        return component


def served(place: InFolder) -> Any:
    """Return an app's ServerApp. It is loaded once, until its folder is forgotten or another app is loaded.

    Raises:
        ValueError: see `InFolder`.
        Exception: any error of the app's modules.
    """
    key = place, place.changed
    if key not in _served:
        for other, _ in list(_served):
            forget(other.folder)
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no __pycache__ in a user's folder
        try:
            _served[key] = place()
        except BaseException:
            forget(place.folder)
            raise
        finally:
            sys.dont_write_bytecode = before
    return _served[key]


def is_built(place: InFolder) -> bool:
    """Return whether `flower_dp.app` made a ServerApp; False if it can't be loaded, as the run itself will report."""
    return _is_built(place, place.changed)


# A sweep calls it for each of its runs.
@lru_cache(maxsize=64)
def _is_built(place: InFolder, changed: int) -> bool:
    with suppress(Exception, SystemExit), contextlib.chdir(place.folder), contextlib.redirect_stdout(sys.stderr):
        return served(place) in BUILT
    return False


def forget(folder: str) -> None:
    """Drop the imported modules of a folder, and remove the folder from Python's search path.

    Modules of a virtual environment in the folder stay: most packages can't be imported twice.
    """
    for key in [key for key in _served if key[0].folder == folder]:
        del _served[key]
    prefix = str(Path(folder).resolve()) + "/"
    for name, file in _own_files():
        if file.startswith(prefix):
            del sys.modules[name]
    while folder in sys.path:
        sys.path.remove(folder)
    importlib.invalidate_caches()


def forget_changed() -> None:
    """Drop all imported modules if one of them has changed on disk since the last call. Installed packages stay."""
    global _looked
    since, _looked = _looked, time.time_ns()
    files = _own_files()
    if any(_changed(file) > since for _, file in files):
        for name, _ in files:
            del sys.modules[name]
        importlib.invalidate_caches()


def _changed(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:  # the file is gone
        return 0


def _own_files() -> list[tuple[str, str]]:
    """Return the imported modules that are neither installed nor the program itself, with their files."""
    installed = tuple(f"{place}/" for place in (sys.prefix, sys.base_prefix, sys.exec_prefix, _PACKAGE))
    named = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    candidates = [
        (name, str(Path(file).resolve()))
        for name, file in named.items()
        # Check before `resolve`: to resolve the thousands of files in site-packages takes half a second.
        if isinstance(file, str) and file.endswith(".py") and "/site-packages/" not in file
        if name not in ("__main__", "__mp_main__")
    ]
    return [(name, file) for name, file in candidates if not file.startswith(installed) and "/site-packages/" not in file]
