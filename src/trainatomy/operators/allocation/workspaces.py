"""The workspaces of cuBLAS and cuBLASLt, which are allocated at first use, or for each call.

A workspace belongs to a (handle, stream) and handles belong to threads, so that the thread which calls ``backward`` and
autograd's own each allocate one. That happens between the call's output and its kernel, and the workspace is kept for
the life of the process; the sizes are in ``trainatomy.catalog.versions``. From torch 2.15 on each call allocates the
workspace of the library that computes it, and frees it when the kernel is launched.

Sources: aten/src/ATen/cuda/CublasHandlePool.cpp (``getCurrentCUDABlasHandle``, ``getCUDABlasLtWorkspace``),
aten/src/ATen/native/cuda/Blas.cpp, torch 2.9-2.14; ``CUDABlasHandleWithWorkspace`` and ``allocateCUDABlasWorkspace`` of
2.15.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainatomy.catalog.versions import workspaces, workspaces_per_call
from trainatomy.operators.registry import find

if TYPE_CHECKING:
    from trainatomy.operators.allocation.plan import Processor

Thread = Literal["forward", "backward"]

_NAMES = {"cublas": "cublas_workspace", "cublaslt": "cublaslt_workspace"}


class Workspace(NamedTuple):
    """A workspace that a call allocates.

    Attributes:
        bytes: Size.
        name: Whose it is.
        is_kept: Whether it is kept, or freed after the call.
    """

    bytes: int
    name: str
    is_kept: bool = True


def product_of(name: str, arguments: Sequence[Any]) -> str:
    """Return the operator whose libraries a product uses: with a matrix as its bias, that of one without a bias.

    cuBLASLt's epilogue adds a vector; PyTorch gives a product that is added to a matrix, in place or not, to cuBLAS.
    Source: aten/src/ATen/native/cuda/Blas.cpp, ``isInputCompliesAddmmCudaLt``, torch 2.9-2.11 (later both share a
    workspace); an H200 with torch 2.11 allocated no workspace of cuBLASLt for such products.
    """
    return "aten::mm" if name.startswith("aten::addmm") and arguments and arguments[0].dim() != 1 else name


class WorkspaceTracker:
    """The workspaces that a process has allocated so far on ``processor``.

    ``size`` returns the size that a function finds for a GPU, which may be another one on other GPUs.
    """

    def __init__(self, processor: Processor, size: Callable[[Callable[[Processor], int]], int] | None = None) -> None:
        self._environment = dict(os.environ)
        self._per_call = workspaces_per_call(processor.torch_version, self._environment)
        self._size = size or (lambda size_on: size_on(processor))
        self._taken: set[tuple[str, Thread, int]] = set()

    def __call__(self, call_name: str, in_backward: bool, stream: int = 0) -> list[Workspace]:
        """Return ``before`` with the arguments that the recorder passes."""
        return self.before(call_name, "backward" if in_backward else "forward", stream)

    def before(self, call_name: str, thread: Thread, stream: int = 0) -> list[Workspace]:
        """Return the workspaces that a call of "aten::mm" on a stream allocates now."""
        operator = find(call_name)
        taken = () if operator is None else operator.workspaces
        if self._per_call:
            taken = taken[-1:]  # cuBLASLt computes what takes both; only its handle is cuBLAS'
        found = []
        for library in taken:
            name = _NAMES[library]
            if not self._per_call and not self._first(name, thread, stream):
                continue
            if size := self._size(partial(self._bytes_of, library)):
                found.append(Workspace(size, name, not self._per_call))
        return found

    def _bytes_of(self, library: str, processor: Processor) -> int:
        sizes = workspaces(processor.capability, processor.torch_version, self._environment)
        return int(getattr(sizes, f"{library}_bytes"))

    def _first(self, name: str, thread: Thread, stream: int) -> bool:
        key = name, thread, stream
        first = key not in self._taken
        self._taken.add(key)
        return first
