"""Derivatives by `torch.func` without torch's compiler, whose import takes most of a second in every process of a device."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_AUTOGRAD = f"{_COMPILER}.compiled_autograd"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let `torch.func` differentiate within this context, and not import the compiler for it.

    It asks the compiler to leave compiled autograd off, which nobody can have turned on where the compiler was never imported.
    All else that is asked of the compiler imports it. What is replaced here is private to torch: a version that does not ask is
    not affected.
    """
    if _COMPILER in sys.modules:
        yield
        return
    instead = _Compiler()
    setattr(torch, "_dynamo", instead)  # noqa: B010  (torch has it as a module that is imported when it is asked for)
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is instead:
            delattr(torch, "_dynamo")


class _Autograd:
    """Compiled autograd, which is off."""

    _disable = staticmethod(nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_AUTOGRAD), name)


class _Compiler:
    """The compiler, before anybody has asked for more of it than to be off."""

    @property
    def compiled_autograd(self) -> Any:
        return sys.modules.get(_AUTOGRAD) or _Autograd()

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_COMPILER), name)
