"""torchvision, imported only when it is asked for."""

import importlib
from types import ModuleType
from typing import Any

_MISSING_OPERATOR = "operator torchvision::nms does not exist"
NEEDED = "needs torchvision, in the build that fits torch here (pip install 'flower-dp[vision]')"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> Any:
    """Import torchvision, also where its compiled operators do not fit a CPU-only build of torch.

    There a plain import fails because torchvision registers shapes for two operators that its library failed to
    define. Only after exactly that failure are the two declared, without an implementation, and the import repeated.
    Data sets, transforms and models then work; non-maximum suppression does not.

    Raises:
        ImportError: If torchvision is not installed.
        RuntimeError: If its import fails for any other reason.
    """
    try:
        return _import()
    except RuntimeError as error:
        if str(error) != _MISSING_OPERATOR:
            raise
    import torch  # noqa: PLC0415 - takes a second

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", _SCHEMA)
    return _import()


def _import() -> ModuleType:
    return importlib.import_module("torchvision")
