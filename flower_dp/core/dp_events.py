"""The events of dp-accounting, imported on first use and without its accountants.

The accountants import SciPy, which takes a second. A device that charges its ledger needs neither.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_accounting.dp_event import *  # noqa: F403 (so that a checker knows them)

_PACKAGE = "dp_accounting"
_EVENTS = f"{_PACKAGE}.dp_event"


def __getattr__(name: str) -> Any:
    if not name.endswith("DpEvent"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_events_alone()
    event = globals()[name] = getattr(importlib.import_module(_EVENTS), name)
    return event


def _import_events_alone() -> None:
    """Import dp-accounting's module of events before its package, which imports the accountants.

    If the package is imported later, it finds this module in `sys.modules` and uses it.
    """
    if _PACKAGE in sys.modules or _EVENTS in sys.modules or (package := importlib.util.find_spec(_PACKAGE)) is None:
        return
    spec = importlib.util.spec_from_file_location(_EVENTS, Path(str(package.origin)).with_name("dp_event.py"))
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.setdefault(_EVENTS, module)  # another thread may have imported the package meanwhile
