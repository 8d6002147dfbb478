"""Choice of the products of unaligned sizes that Inductor pads, which it makes by measuring both on the GPU."""

from __future__ import annotations

from typing import Any

import torch

from trainatomy.catalog.gpus import GPU, gpus

_RATES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def pads(device_name: str, match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None) -> bool:
    """Return whether Inductor pads a product on a GPU.

    Where operands are written padded by the kernels that compute them, padding costs nothing, and an aligned product is
    faster.  Where they are copied first, each is read and written once more than the product reads it: a product that
    is bound by memory loses by that, one that is bound by computation wins.

    Source: torch 2.11-2.13, torch/_inductor/fx_passes/pad_mm.py (``_should_pad``, ``should_exclude_padding_time``).

    Args:
        device_name: The GPU's name, as its driver reports it.
        match: Inductor's match of the product's pattern.
        mat1: The first operand, [M, K] or a batch of such.
        mat2: The second one, [K, N].
        op: The product.
        input: What is added to it.
    """
    from torch._inductor.fx_passes.pad_mm import is_mm_compute_bound

    m, k, n = mat1.shape[-2], mat1.shape[-1], mat2.shape[-1]
    if not is_mm_compute_bound(m, k, n, mat1.dtype):
        return False
    gpu = next((one for one in gpus() if one.device_name == device_name), None)
    return gpu is None or not _copies(match, mat1, mat2) or _is_bound_by_computation(gpu, m, k, n, mat1.dtype)


def _copies(match: Any, mat1: torch.Tensor, mat2: torch.Tensor) -> bool:
    """Return whether an operand that needs padding is copied for it."""
    from torch._inductor.fx_passes import pad_mm

    for name, operand in (("mat1", mat1), ("mat2", mat2)):
        unit = pad_mm.get_alignment_size(operand)
        needs = any(pad_mm.get_padded_length(size, unit) for size in operand.shape[-2:])
        if needs and not pad_mm.should_exclude_padding_time(match, name):
            return True
    return False


def _is_bound_by_computation(gpu: GPU, m: int, k: int, n: int, dtype: torch.dtype) -> bool:
    """Return whether the arithmetic of a product takes longer than moving its operands and its result."""
    name = _RATES[dtype]
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        name = "tf32"
    rate = gpu.rates.get(name) or gpu.rates["fp32"]
    moved = (m * k + k * n + m * n) * dtype.itemsize
    return 2 * m * k * n / rate > moved / gpu.bandwidth_bytes_per_second
