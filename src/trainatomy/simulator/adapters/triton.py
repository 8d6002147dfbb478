"""Triton kernels on meta tensors, and Liger's layers, which are made of them.

A Triton kernel allocates nothing: the Python around it makes the tensors that it writes to.  So Liger's own Python runs
as it is, the installed version's, and a launch does nothing but write an operation.  Its time is that of moving each
tensor that it is given once: these kernels are bound by memory.

Source: triton 3.0-3.9, runtime/jit.py and runtime/autotuner.py; liger-kernel 0.8, transformers/monkey_patch.py.

TRL's Triton kernels on meta tensors: launches are operations, and the Python around them runs as it is.

TRL computes the log-probabilities of tokens from tiles of the logits, by matrix products of PyTorch and a Triton kernel
for each tile.  Without Triton it folds the tiles by operators of PyTorch, which allocate; on Linux every CUDA build of
PyTorch brings Triton, so a simulation takes it as installed whether it is here or not.

Source: trl 1.16, kernels/chunked_logprob.py.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from trainatomy.errors import SimulationError
from trainatomy.libraries import import_library, version_of
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.workload.schema import Workload

_EXTRA = "'trainatomy[liger]'"
_PURPOSE = "train.use_liger_kernel"
_PATCHED = "transformers.models."
"""Modules whose classes and functions Liger replaces, for the whole process."""


def uses_liger(workload: Workload) -> bool:
    """Return whether a training replaces a model's layers by Liger's."""
    return workload.mode == "training" and workload.train.use_liger_kernel


def import_liger() -> ModuleType:
    """Import Liger as on a machine with a GPU, and return the module that patches models.

    It asks for the device when it is imported, and chooses its kernels and autocast by the answer.

    Raises:
        MissingLibrary: Liger or Triton is not installed.
    """
    with contextlib.suppress(ImportError):
        import_module("peft")  # Liger imports it, and with it bitsandbytes, which must not see the GPU
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it lists implementations that are not installed
    import_library("triton", _PURPOSE, install=_EXTRA)
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        import_library("liger_kernel", _PURPOSE, install=_EXTRA)
        import_module("liger_kernel.ops")
        return import_module("liger_kernel.transformers.monkey_patch")


def has_liger_kernels(model_type: str) -> bool:
    """Return whether Liger replaces anything in models of that type."""
    return model_type in import_liger().MODEL_TYPE_TO_APPLY_LIGER_FN


@contextlib.contextmanager
def simulated_liger() -> Iterator[None]:
    """Let the Trainer patch a model with Liger's layers, and undo what that changes outside the model."""
    import_liger()
    utilities = import_module("liger_kernel.utils")
    forget = getattr(getattr(utilities, "infer_device_arch", None), "cache_clear", lambda: None)
    forget()  # it may remember another simulated GPU
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(_PATCHED) and module is not None]
    kept = [(module, dict(vars(module))) for module in (*modules, torch.nn.functional)]
    try:
        with simulated_triton():
            yield
    finally:
        forget()
        for module, values in kept:
            for name, value in values.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


@contextlib.contextmanager
def simulated_triton() -> Iterator[None]:
    """Replace launches of Triton kernels, also those that are tuned or have heuristics, by operations."""
    jit, autotuner = import_module("triton.runtime.jit"), import_module("triton.runtime.autotuner")
    with contextlib.ExitStack() as stack:
        for launcher in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
            stack.enter_context(mock.patch.object(launcher, "run", _launch))
        yield


def _launch(kernel: Any, *arguments: Any, **keywords: Any) -> None:
    """Write a launch as an operation."""
    tensors = [each for each in (*arguments, *keywords.values()) if isinstance(each, torch.Tensor)]
    with one_operation("triton::kernel", *tensors):
        pass


MODULE = "trl.kernels.chunked_logprob"
"""The module of the kernels, which TRL's trainers import."""


class _Kernel:
    """A kernel whose launch, ``kernel[grid](...)``, does nothing but write an operation."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **keywords: Any) -> None:
        tensors = [each for each in (*arguments, *keywords.values()) if isinstance(each, torch.Tensor)]
        with one_operation("triton::kernel", *tensors):
            self._write(tensors)

    def _write(self, tensors: list[torch.Tensor]) -> None:
        """Do to the values of the tensors what the kernel does, if they may be known."""


class _ForwardKernel(_Kernel):
    """The kernel that folds a tile of logits into statistics of the tokens.

    They begin as constants; after it they are as unknown as the logits, so that the loss is not taken as infinite.
    """

    def _write(self, tensors: list[torch.Tensor]) -> None:
        tile, _, *statistics = tensors
        for each in statistics:
            each.copy_(tile[:, 0])


_KERNELS: dict[str, _Kernel] = {"_forward_kernel": _ForwardKernel(), "_backward_kernel": _Kernel()}


class _Triton:
    """The part of Triton's module that the Python around the kernels calls."""

    @staticmethod
    def cdiv(numerator: int, denominator: int) -> int:
        return -(-numerator // denominator)


@contextlib.contextmanager
def simulated_trl() -> Iterator[None]:
    """Replace TRL's kernels.

    Raises:
        SimulationError: The installed release has other kernels.
    """
    try:
        module = import_module(MODULE)
        found = {name: getattr(module, name) for name in (*_KERNELS, "_TRITON_AVAILABLE")}
    except (ImportError, AttributeError):
        message = f"trl {version_of('trl')} computes its losses otherwise than trl 1.16, which is simulated"
        raise SimulationError(f"{message}: pip install 'trl>=1.16'") from None
    with contextlib.ExitStack() as stack:
        for name in found:
            stack.enter_context(mock.patch.object(module, name, _KERNELS.get(name, True)))
        stack.enter_context(mock.patch.object(module, "triton", _Triton, create=True))
        yield
