"""What transformers, accelerate and PyTorch remember for a whole process about its device, and how to make them forget.

A run without a GPU must not see what an earlier one was told, nor leave what it was told to a later one.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.errors import MissingLibrary
from trainatomy.workload.arguments import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.workload.schema import Workload

_LOOPS = tuple(f"trainatomy.training.loops.{name}" for name in ("trainer", "pytorch", "inference"))
_backends: Any = torch.backends
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
    precision = _backends.fp32_precision
    forget_device()
    logging: Any = sys.modules.get("transformers.utils.logging")
    verbosity = logging.get_verbosity() if logging is not None else None
    try:
        yield
    finally:
        _backends.fp32_precision = precision
        logging = sys.modules.get("transformers.utils.logging")
        if logging is not None and verbosity is not None:
            logging.set_verbosity(verbosity)
        forget_device()


def preload(workload: Workload) -> None:
    """Import all that ``run`` will need.

    A world that only seems to have a GPU must call this before it is entered: while they are imported, parts of PyTorch
    (``torch._dynamo``) look for functions that only a build with CUDA has.  Raises ``MissingLibrary``.
    """
    import_module("torch._dynamo")
    for library in ("accelerate", "transformers.trainer", *_LOOPS):
        try:
            import_module(library)
        except ImportError as error:
            message = f"{library} cannot be imported ({error}): pip install accelerate transformers"
            raise MissingLibrary(message) from error
    if workload.model.lora is not None:
        import_library("peft", "model.lora")
    package = arguments().optimizers.get(workload.train.optim)
    if package is not None and workload.mode == "training":
        import_library(package, f"train.optim: {workload.train.optim}")


def import_library(name: str, key: str) -> Any:
    """Import an optional library; raises ``MissingLibrary`` with the command that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingLibrary(f"{key} needs {name}, which is not installed: pip install {name}") from error
