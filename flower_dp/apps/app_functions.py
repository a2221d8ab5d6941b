"""Import functions that a run-config names as "module:function", from the app's own modules only.

The server writes the run-config, even if a device has pinned the app. For a run-config, a device imports and calls only code of
the pinned app. Its own node-config may name any function.
"""

import importlib
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from flower_dp.running.apps import App, read_app

# Packages that an app's bundle may contain; their functions are not the app's own.
_PACKAGES = ("flower_dp",)
_PREFIXES = tuple(Path(path).resolve() for path in set(sysconfig.get_paths().values()))


def named(key: str, reference: str, *, trusted: bool, default_alone: bool = False) -> Any:
    """Import a function by its name.

    Args:
        key: setting that names the function.
        reference: "module:function", or "".
        trusted: whether the owner of this process named the function; then it may be in any module.
        default_alone: whether only the function that the app's own pyproject.toml names under the same key is allowed.

    Returns:
        The function; None for an empty reference.

    Raises:
        ValueError: naming key and value, if the function does not exist or is not the app's own.
    """
    if not reference:
        return None
    name, _, attribute = reference.partition(":")
    try:
        places = {} if trusted else own_modules(name)
        if default_alone and not trusted and (default := _app_of(places[name]).defaults.get(key)) != reference:
            raise ValueError(f"this device has settings of its own, and its app names {default!r}; set {key} in its node-config")
        function = getattr(importlib.import_module(name), attribute)
        if not trusted:
            _check_loaded(places)
            _check_origin(function)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}={reference!r}: {error}; must be 'module:function' of the app") from None
    return function


def own_modules(name: str) -> dict[str, Path]:
    """Return the paths of an app's module and of the packages around it, by name, without importing anything.

    Raises:
        ValueError: if the module is not in a Flower app's own folder.
    """
    places: dict[str, Path] = {}
    path: list[str] | None = None
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)) or parts[0] in sys.stdlib_module_names or parts[0] in _PACKAGES:
        raise ValueError(f"module {parts[0]!r} is not the app's own")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        spec = PathFinder.find_spec(full, path) if count == 1 or path else None
        if spec is None:
            raise ValueError(f"No module named {full!r} in the app's folder")
        places[full] = _place(spec)
        path = list(spec.submodule_search_locations or ())
    top = places[parts[0]]
    if top.parent != (folder := _app_of(top).folder):
        raise ValueError(f"{top} is not directly in the app's folder {folder}")
    for full, place in places.items():
        if not place.is_relative_to(folder):
            raise ValueError(f"module {full!r} is in {place}, not in the app's folder {folder}")
    return places


def _app_of(place: Path) -> App:
    """Return the Flower app around a module's file."""
    for folder in place.parents:
        if any(folder == prefix for prefix in _PREFIXES):
            break
        if (app := read_app(folder)) is not None and not app.own:
            return app
    raise ValueError(f"{place} is not in the folder of a Flower app")


def _place(spec: ModuleSpec) -> Path:
    """Return the file of a module, or the folder of a package."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    if not spec.has_location or spec.origin is None:
        raise ValueError(f"module {spec.name!r} is not a file")
    return Path(spec.origin).resolve()


def _check_loaded(places: dict[str, Path]) -> None:
    """Refuse a module that was imported from another path before."""
    for name, place in places.items():
        spec = sys.modules[name].__spec__
        if spec is None or _place(spec) != place:
            raise ValueError(f"module {name!r} is loaded already, from another path than {place}")


def _check_origin(function: Any) -> None:
    """Refuse a function that a module of the app has only imported, such as `kill` after `from os import kill`."""
    module = getattr(function, "__module__", None)
    if not isinstance(module, str):
        raise ValueError(f"is a {type(function).__name__} without a module")
    own_modules(module)
