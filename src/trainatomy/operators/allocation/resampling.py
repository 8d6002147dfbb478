"""Memory of interpolations besides their results.

The gradient of a linear interpolation reads the gradient of its output after making it contiguous.
Source: aten/src/ATen/native/cuda/UpSampleLinear1d.cu (``upsample_linear1d_backward_out_cuda_template``), and the
allocations of a recorded training (torch 2.11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.operators.allocation.arguments import bound, contiguous_copies
from trainatomy.operators.allocation.plan import Out

if TYPE_CHECKING:
    from trainatomy.operators.allocation.plan import KernelCall, Plan


def linear_gradient(call: KernelCall) -> Plan:
    """Plan the gradient of an interpolation over one dimension."""
    return [Out(0), *contiguous_copies(bound(call)["grad_output"])]
