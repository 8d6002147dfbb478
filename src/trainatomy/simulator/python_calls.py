"""Count what a model's code asks of others than PyTorch's operations in a step: functions of NumPy, and seeds.

They take the CPU's time: to choose the blocks that a BigBird attends to, to mask a speech model's inputs, to let a
Reformer draw the same hashes again in backward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

NUMPY, SEED = "numpy", "manual_seed"
"""Names of what is counted, as in ``hosts.yaml`` (``python_call``)."""


class _CountedModule(ModuleType):
    """A module whose functions are counted when they are called.

    Types, constants and ``ufunc``s, which have methods of their own, are the module's.
    """

    def __init__(self, module: ModuleType, count: Callable[[str], None]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self._module, self._count = module, count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, ModuleType):
            found: Any = _CountedModule(value, self._count)
        elif callable(value) and not isinstance(value, type) and type(value).__name__ != "ufunc":
            found = _counted(value, NUMPY, self._count)
        else:
            return value
        self.__dict__[name] = found
        return found


def _counted(function: Any, name: str, count: Callable[[str], None]) -> Any:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        count(name)
        return function(*args, **kwargs)

    return called


def count_calls(stack: ExitStack, count: Callable[[str], None]) -> None:
    """Let ``count`` have the name of each call of NumPy by code in a module's file, and of each seed.

    ``stack`` undoes it.
    """
    stack.enter_context(mock.patch.object(torch, SEED, _counted(torch.manual_seed, SEED, count)))
    seen: set[type[nn.Module]] = set()

    def enter(module: nn.Module, _: Any) -> None:
        kind, numpy = type(module), sys.modules.get(NUMPY)
        if kind in seen or kind.__module__.partition(".")[0] == "torch" or numpy is None:
            return
        seen.add(kind)
        names = getattr(inspect.unwrap(kind.forward), "__globals__", {})  # those of the file that defines it
        for key in [key for key, value in names.items() if value is numpy]:
            names[key] = _CountedModule(numpy, count)
            stack.callback(names.__setitem__, key, numpy)

    stack.callback(register_module_forward_pre_hook(enter).remove)
