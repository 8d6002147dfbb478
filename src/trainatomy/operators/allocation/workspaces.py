"""When cuBLAS and cuBLASLt take their workspaces.

A workspace belongs to a (handle, stream) and handles belong to threads, so that the thread which calls ``backward`` and
autograd's own each take one. They are taken between the call's output and its kernel, and kept for the life of the
process. Sources: aten/src/ATen/cuda/CublasHandlePool.cpp (``getCurrentCUDABlasHandle``, ``getCUDABlasLtWorkspace``),
aten/src/ATen/native/cuda/Blas.cpp, torch 2.9-2.14; the sizes are in ``trainatomy.catalog.workspaces``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trainatomy.catalog.workspaces import workspaces

if TYPE_CHECKING:
    from trainatomy.operators.allocation.plan import Processor

Thread = Literal["forward", "backward"]

_CUBLAS = frozenset({"mm", "bmm", "baddbmm", "addmv", "mv", "dot", "vdot", "addbmm", "_addmm_activation", "addmm"})
_CUBLASLT = frozenset({"addmm", "_addmm_activation", "_scaled_mm", "_int_mm"})
"""``addmm`` of a bias goes through cuBLASLt's epilogue; ``mm`` and batched products do not."""


class Workspaces:
    """The workspaces that a process has taken so far on ``processor``."""

    def __init__(self, processor: Processor) -> None:
        self._sizes = workspaces(processor.capability, processor.torch_version)
        self._taken: set[tuple[str, Thread]] = set()

    def __call__(self, call_name: str, in_backward: bool) -> list[tuple[int, str]]:
        """``before`` as the recorder asks for it."""
        return self.before(call_name, "backward" if in_backward else "forward")

    def before(self, call_name: str, thread: Thread) -> list[tuple[int, str]]:
        """(bytes, name) of each workspace that ``call_name`` ("aten::mm") makes ``thread`` take now, cuBLAS' first."""
        operator = call_name.removeprefix("aten::").removesuffix("_").removesuffix(".out")
        needed = []
        if operator in _CUBLAS or operator in _CUBLASLT:
            needed.append(("cublas_workspace", self._sizes.cublas_bytes))
        if operator in _CUBLASLT:
            needed.append(("cublaslt_workspace", self._sizes.cublaslt_bytes))
        return [(size, name) for name, size in needed if size and self._first(name, thread)]

    def _first(self, name: str, thread: Thread) -> bool:
        first = (name, thread) not in self._taken
        self._taken.add((name, thread))
        return first
