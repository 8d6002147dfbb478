"""Tracks the module at work: by hooks in forward, by the sequence numbers of autograd's nodes in backward.

Count what a model's code asks of others than PyTorch's operations in a step: functions of NumPy, and seeds.

They take the CPU's time: to choose the blocks that a BigBird attends to, to mask a speech model's inputs, to let a
Reformer draw the same hashes again in backward.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from trainatomy.training.checkpointing import Recomputation
from trainatomy.training.model import around, output_layers


class ModuleTracker:
    """Stack of the modules that are being called.

    Args:
        on_recomputation: Called with True when a forward begins to run again in backward, with False when it ends.

    Attributes:
        output_layers: Paths of the modules that make logits.
        around_output_layers: Paths of the modules that these lie in.
        on_call: Called for every call of a module, where it is set.
    """

    def __init__(self, on_recomputation: Callable[[bool], None]) -> None:
        self._recomputation = Recomputation(on_recomputation)
        self.output_layers, self.around_output_layers = set[str](), set[str]()
        self.on_call: Callable[[], None] | None = None
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._by_sequence: dict[int, str] = {}
        self._installed = contextlib.ExitStack()

    def learn(self, model: nn.Module) -> None:
        """Take the names of a model's modules; the model itself goes by its class."""
        plain = _plain(model)
        for name, module in plain.named_modules():
            self._paths.setdefault(id(module), name or type(module).__name__)
        for layer in output_layers(plain):
            self.output_layers.add(self.path(plain.get_submodule(layer)))
            self.around_output_layers.update(self.path(plain.get_submodule(name)) for name in around(layer))

    def learn_copy(self, copy: nn.Module, module: nn.Module) -> None:
        """Let a copy of a module that is made for one step (``DataParallel``) go by the name of the original."""
        self._paths[id(copy)] = self.path(module)
        weakref.finalize(copy, self._paths.pop, id(copy), None)  # a later module may have its id

    def path(self, module: nn.Module) -> str:
        """Return a module's path in the model, or its class if it is not part of it."""
        plain = _plain(module)
        return self._paths.get(id(module)) or self._paths.get(id(plain)) or type(plain).__name__

    def __enter__(self) -> ModuleTracker:
        with contextlib.ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self._recomputation.following(self._caller, self._again))
            self._installed = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._installed.close()

    @property
    def recomputing(self) -> bool:
        """True during backward while a checkpointed forward runs again."""
        return self._recomputation.runs

    def operation(self) -> None:
        """Remember which module the autograd node of the operation that just ran belongs to, if one was made.

        A node has its number before its operation runs; an operation without a node finds the last one's, which is
        taken.
        """
        if self._stack and torch.is_grad_enabled():
            self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._stack[-1])

    def custom_operation(self) -> None:
        """Remember the module of the running forward of an ``autograd.Function``, whose node exists already."""
        if self._stack:
            self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._stack[-1])

    def current(self) -> str:
        """Return the path of the module at work, "" for none."""
        if self._stack:
            return self._stack[-1]
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._by_sequence.get(node._sequence_nr(), "")
        return ""

    def _caller(self) -> str:
        """Return the path of the module that is being called, "" for none."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def _again(self, path: str) -> Iterator[None]:
        """Run the block for a module, as if it were being called."""
        self._stack.append(path)
        try:
            yield
        finally:
            self._stack.pop()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._recomputation.module_called(len(self._stack))
        self._stack.append(self.path(module))
        if self.on_call is not None:
            self.on_call()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._recomputation.module_returned(len(self._stack))


def _plain(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped, which has the names; any other as it is."""
    plain: nn.Module = vars(module).get("_modules", {}).get("_orig_mod", module)
    return plain


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


@contextlib.contextmanager
def without_hooks_of_all_modules() -> Iterator[None]:
    """Leave out the hooks of all modules, which PyTorch's compiler would make part of its graphs."""
    tables = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.clear()
            table.update(hooks)


def count_calls(stack: ExitStack, count: Callable[[str], None]) -> Callable[[nn.Module, Any], None]:
    """Let ``count`` have the name of each call of NumPy by code in a module's file, and of each seed.

    ``stack`` undoes it.

    Returns:
        A hook that lets it have the calls of a module's file from then on, for modules whose hooks do not run.
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
    return enter
