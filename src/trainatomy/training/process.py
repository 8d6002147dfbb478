"""What transformers, accelerate and PyTorch remember for a whole process about its device, and how to make them forget.

A run without a GPU must not see what an earlier one was told, nor leave what it was told to a later one.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.errors import MissingLibrary
from trainatomy.training.custom import optimizer_class
from trainatomy.workload.arguments import arguments, is_class_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.workload.schema import Workload

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
    """Forget the device before and after; silence transformers' warnings; put TF32 and the verbosity back."""
    precision = _backends.fp32_precision
    forget_device()
    log: Any = sys.modules.get("transformers.utils.logging")
    verbosity = None if log is None else log.get_verbosity()
    if log is not None:
        log.set_verbosity_error()
    try:
        yield
    finally:
        _backends.fp32_precision = precision
        if log is not None:
            log.set_verbosity(verbosity)
        forget_device()


def preload(workload: Workload) -> None:
    """Import all that ``run`` will need.

    Call it before entering a world that only seems to have a GPU: while they are imported, PyTorch's compiler and
    bitsandbytes look for functions that only a build with CUDA has.  Raises ``MissingLibrary``, and what
    ``optimizer_class`` raises.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells what it cannot do on this CPU
    import_module("torch._dynamo")
    if workload.model.lora is not None:
        import_library("peft", "model.lora")
    if workload.mode == "inference":
        import_module("trainatomy.training.loops.inference")
        return
    import_library("accelerate", "the Trainer")
    import_module("transformers.trainer")
    import_module(f"trainatomy.training.loops.{workload.loop}")
    if is_class_path(workload.train.optim):
        optimizer_class(workload.train.optim)
        return
    package = arguments().optimizers.get(workload.train.optim)
    if package is not None:
        with suppress(ImportError):  # the choice of the optimizer tells what is missing
            import_module(package)


def import_library(name: str, key: str) -> Any:
    """Import an optional library; raises ``MissingLibrary`` with the command that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingLibrary(f"{key} needs {name}, which is not installed: pip install {name}") from error
