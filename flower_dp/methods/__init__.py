"""The registry of methods by name, one file per method in this folder. Nothing else in the package lists methods."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from flower_dp.methods.method import TRAINING, Method

__all__ = ["METHODS", "TRAINING", "Method"]


def _registered() -> dict[str, Method]:
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    methods = (module.METHOD for module in modules if hasattr(module, "METHOD"))
    return {method.name: method for method in sorted(methods, key=lambda method: str(method.name))}


METHODS: Mapping[str, Method] = _registered()
