"""Memory that the GPU's page tables take for pinned host memory, outside PyTorch's allocator.

The GPU reads pinned memory through pages of 4 KiB, each with an entry of 8 bytes (``NV_MMU_VER3_PTE__SIZE`` in
dev_mmu.h of NVIDIA's open-gpu-kernel-modules), and the driver takes memory for them in steps of 2 MiB.  Five trainings
on an H200 (driver 580.159.04, 2026-11-23) that pin 4.2 to 9.8 GiB hold 6 to 18 MiB more than their context, within
2 MiB of that; those that pin less than 0.4 GiB hold none.
"""

from __future__ import annotations

_PAGE_BYTES = 4096
_ENTRY_BYTES = 8
_STEP_BYTES = 2 << 20


def page_table_bytes(pinned: int) -> int:
    """Return the bytes on the GPU for this many bytes of pinned host memory."""
    return pinned // _PAGE_BYTES * _ENTRY_BYTES // _STEP_BYTES * _STEP_BYTES
