"""torchvision's pooling of regions: results that are zeroed first, then contiguous copies of what is read.

Source: torchvision/csrc/ops/cuda/roi_align_kernel.cu, roi_pool_kernel.cu, ps_roi_align_kernel.cu,
ps_roi_pool_kernel.cu, torchvision 0.24-0.29.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainatomy.operators.allocation.plan import KernelCall, Out, Plan, Scratch


def pooled(call: KernelCall) -> Plan:
    """Return what pooling allocates, and the gradient of position-sensitive pooling: it copies both first arguments."""
    return _with_copies(call, (0, 1))


def scattered(call: KernelCall) -> Plan:
    """Return what the gradient of ``roi_align`` allocates: it reads its argument by strides."""
    return _with_copies(call, (1,))


def scattered_by_number(call: KernelCall) -> Plan:
    """Return what the gradient of ``roi_pool`` allocates, which also reads where the largest numbers were."""
    return _with_copies(call, (2, 1))


def _with_copies(call: KernelCall, places: Iterable[int]) -> Plan:
    copied = (call.args[place] for place in places if not call.args[place].is_contiguous())
    return [
        *(Out(number) for number in range(len(call.outputs))),
        *(
            Scratch(tensor.numel() * tensor.itemsize, f"contiguous copy {number}")
            for number, tensor in enumerate(copied)
        ),
    ]
