"""Simulations on Ray: a Grid that delivers messages without polling, and `flower_dp.simulate`.

A worker process imports this package before the app, so every name here is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_dp.simulation.grid import RayGrid
    from flower_dp.simulation.run import SimulationResult, simulate
    from flower_dp.simulation.workers import Workers, stop_ray

__all__ = ["RayGrid", "SimulationResult", "Workers", "simulate", "stop_ray"]

_MODULES = {"RayGrid": "grid", "SimulationResult": "run", "simulate": "run", "Workers": "workers", "stop_ray": "workers"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
