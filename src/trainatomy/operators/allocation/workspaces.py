"""The workspaces of cuBLAS and cuBLASLt, which are allocated at first use, or for each call.

A workspace belongs to a (handle, stream) and handles belong to threads, so that the thread which calls ``backward`` and
autograd's own each allocate one. That happens between the call's output and its kernel, and the workspace is kept for
the life of the process; the sizes are in ``trainatomy.catalog.versions``. From torch 2.15 on each call allocates the
workspace of the library that computes it, and frees it when the kernel is launched.

On AMD GPUs hipBLAS and hipBLASLt have handles of their own. Where hipBLASLt is preferred it computes all products of
matrices (those of doubles too, here), and hipBLAS those of vectors.

Sources: aten/src/ATen/cuda/CublasHandlePool.cpp (``getCurrentCUDABlasHandle``, ``getCUDABlasLtWorkspace``),
aten/src/ATen/native/cuda/Blas.cpp, torch 2.9-2.14; ``CUDABlasHandleWithWorkspace`` and ``allocateCUDABlasWorkspace`` of
2.15.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from trainatomy.catalog.versions import prefers_hipblaslt, workspaces, workspaces_per_call
from trainatomy.operators.registry import find

if TYPE_CHECKING:
    from trainatomy.operators.allocation.plan import Processor

Thread = Literal["forward", "backward"]

_OF_MATRICES = frozenset({"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm"})
"""Products that PyTorch gives to the library that it prefers."""


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


class TakenWorkspaces(Protocol):
    """The workspaces that a process has taken; see ``WorkspaceTracker``."""

    def __call__(self, call_name: str, in_backward: bool, stream: int = 0) -> list[Workspace]: ...
    def clear(self) -> None: ...


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
        self._is_amd = processor.is_amd
        self._per_call = not self._is_amd and workspaces_per_call(processor.torch_version, self._environment)
        self._prefers_lt = self._is_amd and prefers_hipblaslt(
            processor.architecture, processor.torch_version, self._environment
        )
        self._size = size or (lambda size_on: size_on(processor))
        self._taken: set[tuple[str, Thread, int]] = set()

    def __call__(self, call_name: str, in_backward: bool, stream: int = 0) -> list[Workspace]:
        """Return ``before`` with the arguments that the recorder passes."""
        return self.before(call_name, "backward" if in_backward else "forward", stream)

    def before(self, call_name: str, thread: Thread, stream: int = 0) -> list[Workspace]:
        """Return the workspaces that a call of "aten::mm" on a stream allocates now."""
        operator = find(call_name)
        taken = () if operator is None else operator.workspaces
        if self._per_call or self._is_amd:
            taken = taken[-1:]  # cuBLASLt computes what takes both; only its handle is cuBLAS'
        if self._prefers_lt and operator is not None and operator.name in _OF_MATRICES:
            taken = ("cublaslt",)
        found = []
        for library in taken:
            name = f"{library.replace('cu', 'hip', 1) if self._is_amd else library}_workspace"
            if not self._per_call and not self._first(name, thread, stream):
                continue
            if size := self._size(partial(self._bytes_of, library)):
                found.append(Workspace(size, name, not self._per_call))
        return found

    def clear(self) -> None:
        """Forget them: the process has released all (``torch._C._cuda_clearCublasWorkspaces``)."""
        self._taken.clear()

    def _bytes_of(self, library: str, processor: Processor) -> int:
        sizes = workspaces(processor.capability, processor.torch_version, self._environment, processor.architecture)
        return int(getattr(sizes, f"{library}_bytes"))

    def _first(self, name: str, thread: Thread, stream: int) -> bool:
        key = name, thread, stream
        first = key not in self._taken
        self._taken.add(key)
        return first
