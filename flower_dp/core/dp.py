"""The events of dp-accounting, imported when the first of them is used.

dp-accounting imports SciPy, which takes most of a second: a device that keeps no account needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_accounting import (
        ComposedDpEvent,
        DpEvent,
        GaussianDpEvent,
        LaplaceDpEvent,
        NonPrivateDpEvent,
        NoOpDpEvent,
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
        SelfComposedDpEvent,
    )

__all__ = [
    "ComposedDpEvent",
    "DpEvent",
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent",
    "SelfComposedDpEvent",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module("dp_accounting"), name)
    return found
