"""Import torchvision, only for the data sets and models that need it."""

import importlib
from types import ModuleType
from typing import Any

_MISSING_OPERATOR = "operator torchvision::nms does not exist"
NEEDED = "needs torchvision, in the build that fits torch here (pip install 'flower-dp[vision]')"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> Any:
    """Import torchvision, even if its compiled operators do not fit a CPU-only build of torch.

    With such a build a plain import fails: torchvision registers shapes for two operators that its library did not define. Only
    after exactly this failure the function declares the two operators, without an implementation, and imports again. Data sets,
    transforms and models then work; non-maximum suppression does not.

    Raises:
        ImportError: if torchvision is not installed.
        RuntimeError: if the import fails for any other reason.
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
