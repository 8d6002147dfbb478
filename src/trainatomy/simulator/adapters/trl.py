"""TRL's Triton kernels on meta tensors: launches are operations, and the Python around them runs as it is.

TRL computes the log-probabilities of tokens from tiles of the logits, by matrix products of PyTorch and a Triton kernel
for each tile.  Without Triton it folds the tiles by operators of PyTorch, which allocate; on Linux every CUDA build of
PyTorch brings Triton, so a simulation takes it as installed whether it is here or not.

Source: trl 1.16, kernels/chunked_logprob.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from trainatomy.errors import SimulationError
from trainatomy.libraries import version_of
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.simulator.adapters.cut_cross_entropy import KERNELS
from trainatomy.simulator.adapters.triton import simulated_triton, write_launch
from trainatomy.workload.loops import loop_of

_MODULE = "trl.kernels.chunked_logprob"
"""The module of the kernels, which TRL's trainers import."""


def _write_forward(arguments: Mapping[str, Any]) -> None:
    """Write the kernel that folds a tile of logits into statistics of the tokens.

    They begin as constants; after it they are as unknown as the logits, so that the loss is not taken as infinite.
    """
    tensors = [each for each in arguments.values() if isinstance(each, torch.Tensor)]
    tile, _, *statistics = tensors
    with one_operation("triton::kernel", *tensors):
        for each in statistics:
            each.copy_(tile[:, 0])


class _Kernel:
    """A kernel where Triton is missing, so that Python finds its plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name, self._names = function.__name__, inspect.signature(function).parameters

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **keywords: Any) -> None:
        write_launch(self._name, {**dict(zip(self._names, arguments, strict=False)), **keywords})


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
        kernels = {name: getattr(module, name) for name in ("_forward_kernel", "_backward_kernel")}
        is_there = module._TRITON_AVAILABLE
    except (ImportError, AttributeError):
        message = f"trl {version_of('trl')} computes its losses otherwise than trl 1.16, which is simulated"
        raise SimulationError(f"{message}: pip install 'trl>=1.16'") from None
    replaced: dict[str, Any] = {name: _Kernel(function) for name, function in kernels.items() if not is_there}
    replaced |= {"_TRITON_AVAILABLE": True, "triton": _Triton}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(KERNELS, {"_forward_kernel": _write_forward}))
        if is_there:
            stack.enter_context(simulated_triton())
        else:
            stack.enter_context(mock.patch.multiple(module, create=True, **replaced))
        yield


ADAPTER = Adapter(
    is_used=lambda workload, _: workload.mode == "training" and loop_of(workload).settings is not None,
    simulated=lambda process, workload: simulated_trl(),
    modules=(_MODULE,),
)
