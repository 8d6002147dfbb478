"""Functions and modules that were compiled before the simulation: their compiler looks for a real GPU.

PyTorch is told to run them without compiling, and FlexAttention inside them answers as compiled code.

Source: torch 2.9-2.13, torch/_dynamo/eval_frame.py (``compile_wrapper``, ``_callback_from_stance``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

_MODULE = "torch._dynamo.eval_frame"
FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_WRAPPER = "compile_wrapper"


@contextlib.contextmanager
def run_without_compiling(notes: list[str]) -> Iterator[None]:
    """Run what was compiled before as it is written; ``notes`` says which."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, "_callback_from_stance"):
        yield
        return

    callback_of = module._callback_from_stance

    def no_callback(callback: Any) -> Any:
        function = _compiled_by(sys._getframe(1))
        if function is None:
            return callback_of(callback)
        if getattr(function, "__module__", "") != FLEX_ATTENTION:
            owner = getattr(function, "__self__", function)
            name = getattr(owner, "__name__", type(owner).__name__)
            note = f"{name} was compiled before the simulation: it ran eagerly, which usually holds more"
            if note not in notes:
                notes.append(note)
        return None

    with mock.patch.object(module, "_callback_from_stance", no_callback):
        yield


def wants_sums() -> bool | None:
    """Return whether the call of ``flex_attention`` that is running returns sums; None if it is not compiled."""
    frame: FrameType | None = sys._getframe(1)
    returns = False
    while frame is not None:
        if frame.f_code.co_name == "flex_attention" and frame.f_globals.get("__name__") == FLEX_ATTENTION:
            given = frame.f_locals
            returns = given["return_lse"] or bool(getattr(given["return_aux"], "lse", False))
        if _compiled_by(frame) is not None:
            return returns
        frame = frame.f_back
    return None


def _compiled_by(frame: FrameType) -> Any:
    """Return the function that a frame of the compiler's wrapper calls; None for any other frame."""
    is_wrapper = frame.f_code.co_name == _WRAPPER and frame.f_globals.get("__name__") == _MODULE
    return frame.f_locals.get("fn") if is_wrapper else None
