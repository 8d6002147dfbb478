"""Fused attention: two products of queries, keys and head in the forward pass, five in the backward (one recomputed).

Blocks of queries (forward) or of keys (backward) are distributed over the multiprocessors; each goes through the blocks
of the other side. Lengths and heads that are no multiples of a block are computed as if they were, and a causal mask
leaves out the blocks above the diagonal.

Where tensor cores have TF32, memory-efficient attention computes products of fp32 as three of TF32. Without tensor
cores it takes as long in 16 bits as in fp32 (a Quadro GP100: https://github.com/facebookresearch/xformers/pull/379).

Sources: Dao, FlashAttention-2 (arXiv 2307.08691); aten/src/ATen/native/transformers/cuda/attention.cu and
mem_eff_attention/gemm_kernel_utils.h.
"""

from __future__ import annotations

from math import ceil, log2, prod

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import HALVES, Chip, KernelWork, efficiency_of, number
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

_FORWARD, _BACKWARD = 4.0, 10.0
"""FLOP for each query, key and element of the head: 2 products, or 5, of 2 FLOP each."""
_BLOCK, _EFFICIENT_BLOCK, _HEAD_BLOCK = 128, 64, 64
"""Block sizes: of flash and cuDNN attention, of CUTLASS's, and along the head."""
_FLASH_HEADS = (32, 64, 96, 128, 192, 256)
"""Sizes of heads that FlashAttention 2 has kernels for (its static_switch.h); others are padded to the next one."""
_ROW_BYTES = 16
"""Bytes of which the length of a mask's rows must be a multiple for them to be read at once."""
_OF_TF32 = 3
"""Products of TF32 for one of fp32."""
_SHARED_SECONDS, _SHARED_BANDWIDTH = 2.0e-6, 0.8
"""Duration and share of the bandwidth of the kernels that sum gradients of shared keys and values."""


def attention(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``_scaled_dot_product_{flash,efficient,cudnn}_attention`` or its backward.

    Queries, keys and values are [batch, heads, length, head].
    """
    backward = call.name.endswith("backward")
    q, k, v = call.inputs[1:4] if backward else call.inputs[:3]
    batch, heads, queries, head = q.shape
    keys = k.shape[2]
    causal = number(call, "is_causal") == "True"
    full = 1.0 * batch * heads * queries * keys * (head + v.shape[3]) / 2
    flop = full * (_BACKWARD if backward else _FORWARD) * (0.5 if causal else 1.0)
    kernel = next(name for name in ("cudnn", "flash", "efficient", "") if name in call.name)
    half = q.dtype in HALVES and chip.has_tensor_cores  # without them, 16 bits take as long as fp32
    moved = traffic(call).bytes
    block = _EFFICIENT_BLOCK if kernel == "efficient" else _BLOCK
    computed = flop * _overhead(queries, keys, causal, block) * _whole_head(head, kernel) / head
    blocks = batch * heads * ceil((keys if backward else queries) / block)
    idle = ceil(blocks / chip.multiprocessors) * chip.multiprocessors / blocks
    rate = chip.precision(q.dtype if half else "float32", tf32=False)
    masks = [tensor for tensor in call.inputs[3:] if _is_mask(tensor, queries, keys, head)]
    mask = _kind_of(masks[-1]) if masks else "causal" if causal else "full"
    family = f"attention.{'half' if half else 'fp32'}.{'backward' if backward else 'forward'}.{kernel}.{mask}"
    efficiency = efficiency_of(family)
    computing = computed * idle / (chip.rate(rate) * efficiency.share)
    seconds = efficiency.kernel_seconds + max(computing, moved / chip.bandwidth)
    if backward and k.shape[1] < heads:  # gradients for each query's head, then summed for the heads that share keys
        seconds += _SHARED_SECONDS + 4 * batch * heads * keys * head * q.itemsize / (chip.bandwidth * _SHARED_BANDWIDTH)
    if number(call, "dropout_p", "0.0") not in ("0.0", "0"):
        seconds *= read_yaml("efficiency.yaml")["attention_dropout"].get(kernel, (1.0, 1.0))[backward]
        family += ".dropout"
    launches = {"cudnn": (2, 4), "flash": (1, 3), "efficient": (1, 5)}.get(kernel, (1, 3))[backward]
    features = (log2(batch * heads) / 2, log2(queries), log2(keys), 2 * log2(head))
    by_tf32 = rate == "fp32" and "tf32" in chip.rates
    instructions = (computed * idle * _OF_TF32, "tf32") if by_tf32 else (computed * idle, rate)
    return KernelWork(family, features, flop, rate, moved, launches, seconds, instructions=instructions)


def flex_flop(call: Call) -> float:
    """Return the FLOP of a kernel of FlexAttention at the blocks of scores that its mask keeps."""
    backward = call.name.endswith("backward")
    q, k, v = call.inputs[1:4] if backward else call.inputs[:3]
    scores = 1.0 * prod(q.shape[:3]) * k.shape[2] * float(number(call, "kept", "1.0"))
    return (_BACKWARD if backward else _FORWARD) * scores * (q.shape[3] + v.shape[3]) / 2


def flex_attention(call: Call, chip: Chip) -> KernelWork:
    """Return the work of FlexAttention's forward or backward kernel.

    It is assumed to be as efficient as FlashAttention's at the blocks that it computes, with heads rounded up to powers
    of two, as its Triton kernels do; no measured point of its own is known.  Keys that several heads of queries share
    need no second kernel.
    """
    backward = call.name.endswith("backward")
    q, k, v = call.inputs[1:4] if backward else call.inputs[:3]
    flop = flex_flop(call)
    whole = prod(ceil(size / _BLOCK) * _BLOCK / size for size in (q.shape[2], k.shape[2]))
    heads = sum(2 ** ceil(log2(size)) for size in (q.shape[3], v.shape[3])) / (q.shape[3] + v.shape[3])
    kernel = "flash" if q.dtype in HALVES else "efficient"
    direction = "backward" if backward else "forward"
    family = f"attention.{'half' if q.dtype in HALVES else 'fp32'}.{direction}.{kernel}.flex"
    efficiency = efficiency_of(family)
    blocks = q.shape[0] * q.shape[1] * ceil((k if backward else q).shape[2] / _BLOCK)
    idle = ceil(blocks / chip.multiprocessors) * chip.multiprocessors / blocks
    rate = chip.precision(q.dtype)
    moved = traffic(call).bytes
    computed = flop * whole * heads * idle
    seconds = efficiency.kernel_seconds + max(computed / (chip.rate(rate) * efficiency.share), moved / chip.bandwidth)
    features = (log2(q.shape[0] * q.shape[1]) / 2, log2(q.shape[2]), log2(k.shape[2]), 2 * log2(q.shape[3]))
    return KernelWork(family, features, flop, rate, moved, 1, seconds, instructions=(computed, rate))


def _whole_head(head: int, kernel: str) -> int:
    """Return the size of head that a kernel computes."""
    if kernel == "flash" and head <= _FLASH_HEADS[-1]:
        return next(size for size in _FLASH_HEADS if size >= head)
    return ceil(head / _HEAD_BLOCK) * _HEAD_BLOCK


def _overhead(queries: int, keys: int, causal: bool, block: int) -> float:
    """Return computed over counted FLOP, by whole blocks; a causal mask crosses two blocks of a row on average."""
    whole = prod(ceil(size / block) * block / size for size in (queries, keys))
    return whole * (min(2.0, 1 + 2 * block / keys) if causal else 1.0)


def _kind_of(mask: Array) -> str:
    """Return the kind of attention with a mask, whose rows are read several numbers at a time if they are aligned."""
    return "masked" if mask.shape[-1] * mask.itemsize % _ROW_BYTES else "aligned mask"


def _is_mask(tensor: Array, queries: int, keys: int, head: int) -> bool:
    return len(tensor.shape) == 4 and tensor.shape[-2:] == (queries, keys) and tensor.shape[-1] != head
