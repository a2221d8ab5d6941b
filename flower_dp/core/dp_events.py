"""The events of dp-accounting, imported when the first of them is used, and without its accountants.

These import SciPy, which takes a second: a device that writes down what it has spent needs neither.
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
    found = globals()[name] = getattr(importlib.import_module(_EVENTS), name)
    return found


def _import_events_alone() -> None:
    """Import dp-accounting's module of events before the package that it is in, which imports the accountants.

    When the package is imported, it finds this module among those that are imported, and takes it for its own.
    """
    if _PACKAGE in sys.modules or _EVENTS in sys.modules or (package := importlib.util.find_spec(_PACKAGE)) is None:
        return
    spec = importlib.util.spec_from_file_location(_EVENTS, Path(str(package.origin)).with_name("dp_event.py"))
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.setdefault(_EVENTS, module)  # another thread may have imported the package meanwhile
