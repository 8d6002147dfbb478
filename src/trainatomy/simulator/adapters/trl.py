"""TRL's Triton kernels on meta tensors: launches are operations, and the Python around them runs as it is.

TRL computes the log-probabilities of tokens from tiles of the logits, by matrix products of PyTorch and a Triton kernel
for each tile.  Without Triton it folds the tiles by operators of PyTorch, which allocate; on Linux every CUDA build of
PyTorch brings Triton, so a simulation takes it as installed whether it is here or not.

Source: trl 1.16, kernels/chunked_logprob.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from trainatomy.errors import SimulationError
from trainatomy.libraries import version_of
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.workload.loops import loop_of

_MODULE = "trl.kernels.chunked_logprob"
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
        module = import_module(_MODULE)
        found = {name: getattr(module, name) for name in (*_KERNELS, "_TRITON_AVAILABLE")}
    except (ImportError, AttributeError):
        message = f"trl {version_of('trl')} computes its losses otherwise than trl 1.16, which is simulated"
        raise SimulationError(f"{message}: pip install 'trl>=1.16'") from None
    with contextlib.ExitStack() as stack:
        for name in found:
            stack.enter_context(mock.patch.object(module, name, _KERNELS.get(name, True)))
        stack.enter_context(mock.patch.object(module, "triton", _Triton, create=True))
        yield


ADAPTER = Adapter(
    is_used=lambda workload, _: workload.mode == "training" and loop_of(workload).settings is not None,
    simulated=lambda process, workload: simulated_trl(),
    modules=(_MODULE,),
)
