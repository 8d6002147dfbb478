"""``torch.compile`` in a script: PyTorch's own compiler where it can be simulated, else nothing.

``torch.jit.script`` and ``torch.jit.trace``: what they would compile runs eagerly.

TorchScript reads the source of PyTorch's functions, which a dry run replaces, and hides its operations from Python.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import SimulationError
from trainatomy.scripts.standins.notes import StandIns, once_called
from trainatomy.simulator.flex.calls import compiled_attention

if TYPE_CHECKING:
    from trainatomy.scripts.signals import ScriptSignals


def _install_torchscript(stand_ins: StandIns) -> None:
    """Let TorchScript compile nothing."""

    def left_out(function: Any, *_: Any, **__: Any) -> Any:
        if isinstance(function, nn.Module):
            stand_ins.note("torchscript", type(function).__name__)
        elif not inspect.isclass(function) and callable(function):
            return once_called(function, lambda: stand_ins.note("torchscript", _name_of(function)))
        return function

    def saved(_: Any, file: Any, **__: Any) -> None:
        if isinstance(file, str | os.PathLike):
            Path(stand_ins.files.to_write(file)).touch()

    torch.autograd.forward_ad._maybe_load_decompositions()  # they are scripted when forward-mode AD is first used
    for name in ("script", "trace", "freeze", "optimize_for_inference"):
        stand_ins.put(torch.jit, name, left_out)
    stand_ins.put(torch.jit, "save", saved)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", "a function"))


def install(stand_ins: StandIns, signals: ScriptSignals, eager: str | None) -> None:
    """Replace ``torch.compile`` and TorchScript.

    Args:
        stand_ins: Of the run.
        signals: Of its loop.
        eager: Why everything runs eagerly; None: it is compiled, and ``preload_compiler`` ran before.
    """
    _install_torchscript(stand_ins)
    if eager is None:
        _install_compiler(stand_ins, signals)
        return

    def left_out(model: Any) -> None:
        stand_ins.note("compiled", _name(model))
        if eager and eager not in stand_ins.process.notes:
            stand_ins.process.notes.append(eager)

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, **options)
        if (replacement := compiled_attention(stand_ins.process, model, options)) is not None:
            return replacement
        if inspect.isfunction(model):
            return once_called(model, lambda: left_out(model))
        left_out(model)
        return model

    def compiled_in_place(module: Any, *_: Any, **__: Any) -> None:
        left_out(module)

    stand_ins.put(torch, "compile", compiled)
    stand_ins.put(nn.Module, "compile", compiled_in_place)


def _install_compiler(stand_ins: StandIns, signals: ScriptSignals) -> None:
    from trainatomy.simulator.compiled import simulated_compiler

    def fails(function: Any, error: SimulationError) -> None:
        stand_ins.note("compiled", _name(function))
        stand_ins.process.notes.append(str(error).partition("\n")[0])

    stand_ins.stack.enter_context(simulated_compiler(stand_ins.process, fails))
    compile_one: Callable[..., Any] = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, **options)
        if (replacement := compiled_attention(stand_ins.process, model, options)) is not None:
            return replacement
        with signals.plain():  # the compiler must not see what watches calls of modules
            found = compile_one(model, **options)
        return found if found is model or isinstance(model, nn.Module) else _watched(model, found, signals)

    stand_ins.put(torch, "compile", compiled)


def _watched(function: Any, compiled: Callable[..., Any], signals: ScriptSignals) -> Callable[..., Any]:
    """Return a compiled function that says which model it is about to call: the compiled code does not."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        found = [*_reached(function), *arguments, *keywords.values()]
        models = [one for one in found if isinstance(one, nn.Module)]
        return signals.calls(models[0] if models else None, compiled, arguments, keywords)

    call._torchdynamo_inline = function  # type: ignore[attr-defined]
    return call


def _reached(function: Any) -> Iterator[Any]:
    """Return the objects that a function's code names: what it is bound to, closes over, and finds in its module."""
    if isinstance(function, nn.Module):
        return
    if (owner := getattr(function, "__self__", None)) is not None:
        yield owner
        return
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        yield from names.nonlocals.values()
        yield from names.globals.values()


def _name(model: Any) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    owner = getattr(model, "__self__", None)
    return "a function" if owner is None else type(owner).__name__
