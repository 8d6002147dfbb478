"""Local memory of kernels: what CUDA sets aside on the GPU for variables that find no register.

CUDA sets it aside for all threads that the GPU can hold, as much for each as the kernel needs that needs most, from
1 KiB on, and keeps it.  Sources: CUDA C++ Programming Guide, "Local Memory" and ``cudaLimitStackSize``.  On an H200
(driver 580.159.04, torch 2.11, 2026-11-24) the first launch of a kernel with a stack of 2,944 or 2,960 bytes raised
that limit to so much, and device memory by 496 or 500 MiB: the bytes of this formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import threads_per_multiprocessor

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU

_DEFAULT_STACK_BYTES = 1024
"""Stack for which the context already holds memory (``cudaLimitStackSize``)."""
_STEP_BYTES = 2 << 20


def local_memory_bytes(stack_bytes: int, gpu: GPU) -> int:
    """Return the bytes beyond the context's own that kernels take whose largest stack is ``stack_bytes`` a thread."""
    more = max(stack_bytes - _DEFAULT_STACK_BYTES, 0)
    threads = gpu.multiprocessors * threads_per_multiprocessor(gpu.capability)
    return -(-more * threads // _STEP_BYTES) * _STEP_BYTES
