"""Triton kernels on meta tensors: a launch does nothing but write an operation.

A Triton kernel allocates nothing: the Python around it makes the tensors that it writes to, and runs as it is. The time
of a launch is that of moving each tensor that it is given once: these kernels are bound by memory.

Source: triton 3.0-3.9, runtime/jit.py and runtime/autotuner.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from trainatomy.libraries import import_library
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.simulator.adapters.cut_cross_entropy import KERNELS
from trainatomy.workload.arguments import arguments, is_factory

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

_OPTIMIZERS = ("torch_optimi", "optimi")
"""Names of a package of optimizers that run kernels of Triton."""


def _is_used(workload: Workload) -> bool:
    optim = workload.train.optim
    return not is_factory(optim) and arguments().package_of(optim) in _OPTIMIZERS


@contextlib.contextmanager
def simulated_triton() -> Iterator[None]:
    """Replace launches of Triton kernels, also those that are tuned or have heuristics, by operations."""
    jit, autotuner = import_module("triton.runtime.jit"), import_module("triton.runtime.autotuner")
    with contextlib.ExitStack() as stack:
        for launcher in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
            stack.enter_context(mock.patch.object(launcher, "run", _launch))
        yield


def _launch(kernel: Any, *arguments: Any, **keywords: Any) -> None:
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
    write_launch(function.__name__, {**dict(zip(kernel.arg_names, arguments, strict=False)), **keywords})


def write_launch(name: str, arguments: Mapping[str, Any]) -> None:
    """Write a launch as an operation: as a library describes its kernel, or as a move of all tensors.

    Args:
        name: Of the kernel.
        arguments: Its arguments by name.
    """
    if (described := KERNELS.get(name)) is not None:
        described(arguments)
        return
    tensors = [each for each in arguments.values() if isinstance(each, torch.Tensor)]
    with one_operation("triton::kernel", *tensors):
        pass


ADAPTER = Adapter(
    is_used=lambda workload, _: _is_used(workload),
    simulated=lambda process, workload: simulated_triton(),
    load=lambda _: import_library("triton", "train.optim"),
    modules=("triton.runtime.jit", "triton.runtime.autotuner"),
)
