"""The registry: every method by its name, one file each in this folder. Nothing else in the package lists methods."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from flower_dp.methods.method import TRAINING, Method

__all__ = ["METHODS", "TRAINING", "Method"]


def _found() -> dict[str, Method]:
    modules = (import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__))
    found = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return {method.name: method for method in sorted(found, key=lambda method: str(method.name))}


METHODS: Mapping[str, Method] = _found()
