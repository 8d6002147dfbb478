"""What transformers, accelerate and PyTorch remember for a whole process about its device, and how to make them forget.

A run without a GPU must not see what an earlier one was told, nor leave what it was told to a later one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CACHED_MODULES = ("transformers.utils.import_utils", "accelerate.utils.imports", "accelerate.utils.environment")


def forget_device() -> None:
    """Drop cached answers about the device (``is_torch_cuda_available``, …) and accelerate's shared state.

    Touches only what is already imported.
    """
    for name in _CACHED_MODULES:
        module = sys.modules.get(name)
        for function in list(vars(module).values()) if module is not None else []:
            clear = getattr(function, "cache_clear", None)
            if callable(clear):
                clear()
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@contextmanager
def own_process_settings() -> Iterator[None]:
    """Forget the device before and after; restore TF32 and the verbosity of transformers' log."""
    precision = torch.backends.fp32_precision
    forget_device()
    logging: Any = sys.modules.get("transformers.utils.logging")
    verbosity = logging.get_verbosity() if logging is not None else None
    try:
        yield
    finally:
        torch.backends.fp32_precision = precision
        logging = sys.modules.get("transformers.utils.logging")
        if logging is not None and verbosity is not None:
            logging.set_verbosity(verbosity)
        forget_device()
