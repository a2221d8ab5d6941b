"""Functions that a run-config names as "module:function": those of the app's own modules, and no others.

A run-config is the server's, also where a device has pinned the app. What a device imports and calls for it is code of the pinned
app alone; what the device's own node-config names is the device's affair.
"""

import importlib
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from flower_dp.running.apps import App, read_app

# Packages that an app's bundle may contain, and that are no model or data of its own.
_PACKAGES = ("flower_dp",)
_PREFIXES = tuple(Path(path).resolve() for path in set(sysconfig.get_paths().values()))


def named(key: str, reference: str, *, trusted: bool, default_alone: bool = False) -> Any:
    """Import a function by its name.

    Args:
        key: the setting that names it.
        reference: "module:function", or empty.
        trusted: whether whoever runs this process has named it; then any module will do.
        default_alone: whether it must be the function that the app's own pyproject.toml names under the same key.

    Returns:
        The function, or None for an empty reference.

    Raises:
        ValueError: naming key and value, if there is no such function, or it is not one of the app's own.
    """
    if not reference:
        return None
    name, _, attribute = reference.partition(":")
    try:
        places = {} if trusted else own_modules(name)
        if default_alone and not trusted and (default := _app_of(places[name]).defaults.get(key)) != reference:
            raise ValueError(f"this device has settings of its own, and its app names {default!r}; set {key} in its node-config")
        found = getattr(importlib.import_module(name), attribute)
        if not trusted:
            _check_loaded(places)
            _check_origin(found)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}={reference!r}: {error}; must be 'module:function' of the app") from None
    return found


def own_modules(name: str) -> dict[str, Path]:
    """Return where a module of the app and the packages around it are, by name; nothing is imported for that.

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
    if top.parent != (folder := _app_of(top).folder):  # that in which its pyproject.toml stands
        raise ValueError(f"{top} is not directly in the app's folder {folder}")
    for full, place in places.items():
        if not place.is_relative_to(folder):
            raise ValueError(f"module {full!r} is in {place}, and not in the app's folder {folder}")
    return places


def _app_of(place: Path) -> App:
    """Return the Flower app around a module's file."""
    for folder in place.parents:
        if any(folder == prefix for prefix in _PREFIXES):
            break
        if (app := read_app(folder)) is not None and not app.own:
            return app
    raise ValueError(f"{place} is in no folder of a Flower app")


def _place(spec: ModuleSpec) -> Path:
    """Return the file of a module, or the folder of a package."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    if not spec.has_location or spec.origin is None:
        raise ValueError(f"module {spec.name!r} is no file")
    return Path(spec.origin).resolve()


def _check_loaded(places: dict[str, Path]) -> None:
    """Refuse a module that was imported from another place before."""
    for name, place in places.items():
        spec = sys.modules[name].__spec__
        if spec is None or _place(spec) != place:
            raise ValueError(f"module {name!r} is loaded already, from elsewhere than {place}")


def _check_origin(found: Any) -> None:
    """Refuse what a module of the app has only imported, such as `kill` after `from os import kill`."""
    module = getattr(found, "__module__", None)
    if not isinstance(module, str):
        raise ValueError(f"is a {type(found).__name__} of no module")
    own_modules(module)
