"""``torch.jit.script`` and ``torch.jit.trace``: what they would compile runs eagerly.

TorchScript reads the source of PyTorch's functions, which a dry run replaces, and hides its operations from Python.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainatomy.scripts.standins.notes import StandIns, once_called


def install(stand_ins: StandIns) -> None:
    """Put them in place."""

    def left_out(function: Any, *_: Any, **__: Any) -> Any:
        if isinstance(function, nn.Module):
            stand_ins.note("torchscript", type(function).__name__)
        elif not inspect.isclass(function) and callable(function):
            return once_called(function, lambda: stand_ins.note("torchscript", _name(function)))
        return function

    def saved(_: Any, file: Any, **__: Any) -> None:
        if isinstance(file, str | os.PathLike):
            Path(stand_ins.files.to_write(file)).touch()

    torch.autograd.forward_ad._maybe_load_decompositions()  # they are scripted when forward-mode AD is first used
    for name in ("script", "trace", "freeze", "optimize_for_inference"):
        stand_ins.put(torch.jit, name, left_out)
    stand_ins.put(torch.jit, "save", saved)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "a function"))
