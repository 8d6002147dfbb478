"""Kernels of bitsandbytes: quantised weights, and optimizers with one launch for each parameter.

With 8-bit states, a block of 256 threads works on 256 elements, which share a scale for each state. It reads states,
gradient and code books one after the other with barriers between them, finds the new scales by a reduction, reads and
writes the parameter, and looks up each new state in a code book of 256 by bisection, in shared memory. That is a chain
of latencies: throughput follows from how many blocks a multiprocessor holds at a time, which the kernel's registers
limit. The traffic alone would be a third of the time.

Sources: csrc/kernels.cu of bitsandbytes 0.45 to 0.50 (``kOptimizerStatic8bit2StateBlockwise``, ``quantize_2D``);
latencies: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture"
(arXiv 2402.13499).  Measured: random sizes on an H200 (lab/timing/records/kernels-h200.jsonl.gz), kernels of
quantised layers (lab/timing/records/quantised-h200.jsonl.gz).

Kernels that PyTorch's compiler writes: what they move, and what they compute for each element.

Arrays are read and written once: what several operators compute stays in registers.  Arithmetic and traffic overlap in
part, so that the time is the root of the sum of their squares.  An array whose neighbours lie apart takes longer than
this says: kernels that read it in another order, as ConvNeXt's permuted norms do, are up to four times as long.

Losses that multiply hidden states with the output layer tile by tile, and store no logits (cut cross-entropy).

Their Triton kernels are assumed to be as fast as cuBLAS's products of the same sizes; no point of them is known.
"""

from __future__ import annotations

from math import ceil, hypot, log2
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, name_of, number, passes_to
from trainatomy.operators.cost.matmul import ProductSizes, kind_of, product
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Call


def fused_loss_flop(call: Call) -> int:
    """Return the FLOP of all products of a kernel."""
    return int(_products(call) * _sizes(call).flop)


def fused_loss(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a kernel: as many products of tokens, words and columns as it says, none of them stored."""
    hidden, head = call.inputs[:2]
    sizes, products = _sizes(call), _products(call)
    if not sizes.m:
        return NOTHING
    one = product(chip, kind_of(chip, hidden, head), hidden.dtype, sizes, "plain.nt")
    return one._replace(
        family="fused loss",
        flop=products * one.flop,
        bytes=traffic(call).bytes,
        seconds=products * one.seconds,
    )


def _sizes(call: Call) -> ProductSizes:
    words, columns = call.inputs[1].shape
    return ProductSizes(1, int(number(call, "rows", "0")), words, columns)


def _products(call: Call) -> int:
    return int(number(call, "products", "1"))


def fused(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a kernel that Inductor wrote, as its source says; else of one that moves its bytes."""
    elements, known = float(number(call, "elements", "0")), number(call, "bytes")
    moved = float(known) if known.isdigit() else traffic(call).bytes
    if not elements:
        passes = passes_to(call, moved, "parts of tensors")
        return memory_bound("traffic.plain.mixed.triton", chip, call, passes=passes) if moved else NOTHING
    form: dict[str, Any] = read_yaml("efficiency.yaml")["fused"]
    kind = number(call, "kind")
    share = form["bandwidth"]["pointwise" if kind == "pointwise" else "reduction"]
    cycles = sum(weight * float(number(call, name, "0")) for name, weight in form["cycles"].items())
    seconds = hypot(moved / (chip.bandwidth * share), elements * cycles / (chip.rates["fp32"] / 2))
    return KernelWork(
        f"fused.{kind}",
        (log2(max(moved, 1) / chip.l2_bytes),),
        bytes=moved,
        seconds=form["start_seconds"] + seconds,
        passes=passes_to(call, moved, "parts of tensors"),
    )


_BLOCK = 256
_BLOCKS_HELD = 2
"""Blocks of 256 threads that a multiprocessor has in progress: measured times on an H200 are those of two."""
_MEMORY_CYCLES, _SHARED_CYCLES, _REDUCTION_CYCLES = 600, 30, 150
_SERIAL_READS = 1
"""Reads of memory that wait for each other besides that of each state: of gradient and parameter."""
_BISECTIONS = 6
"""Steps of the search in the code book in shared memory; the first two are kept in registers."""
_CLOCK_HZ = 1.7e9
"""Clock of GPUs since 2020 under load, roughly."""


_STREAMED_SHARE = 0.8
"""Assumed: share of the bandwidth at which packed weights are read where nothing else bounds a product."""
_START_SECONDS = 4e-6
_WEIGHT_FLOP, _ROW_FLOP, _TILE_FLOP, _TILE_ROWS = 18, 20, 79, 16
"""Work of a 4-bit weight in fp32 operations: to unpack it, for each row by threads alone, and for each tile of rows by
tensor cores.  Measured on an H200: 17 products (``gemm_4bit_simt``, ``gemm_4bit_sm80_m16n8k16``)."""
_INT8_TO_HALF = 2.0
"""Rate of 8-bit integers on tensor cores relative to 16-bit numbers: data sheets of T4, A100, H100."""
_INT8_SHARE, _INT8_TILE = 0.47, 128
"""Share of that rate that a multiprocessor reaches with a tile, and the tile's rows and columns: measured on an H200,
where cuBLASLt takes kernels of CUTLASS for Ampere (14 products)."""


def conversion(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a kernel that quantises or dequantises: traffic of packed and of plain numbers.

    Its family has the bits of a plain number, because a thread looks up or searches each in a code book.  Rows of
    8-bit integers are one block each, so their number counts too.
    """
    if not traffic(call).bytes:
        return NOTHING
    tensors = (call.inputs[0], *(call.inputs[position] for position in call.written), *call.outputs)
    plain = tensors[0].itemsize if name_of(call).startswith(("quantize", "int8_v")) else tensors[-1].itemsize
    first = call.inputs[0]
    rows = first.elements / max(first.shape[-1], 1) if name_of(call) == "int8_vectorwise_quant" else 1
    return memory_bound(f"quantised.{name_of(call)}.{8 * plain}", chip, call, 2 * log2(max(rows, 1)))


def product_4bit(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a product with 4-bit weights, which the kernel unpacks in registers.

    bitsandbytes chooses it where there are few rows (``gemm_4bit.cu``): threads multiply up to some rows, beyond them
    tensor cores.  Unpacking takes longer than reading the weights.
    """
    inputs, (flop, moved) = call.inputs[0], _product(call)
    rate = chip.precision(inputs.dtype)
    rows = max(inputs.elements / max(inputs.shape[-1], 1), 1)
    weights = flop / 2 / rows
    each = min(_WEIGHT_FLOP + _ROW_FLOP * rows, _TILE_FLOP * ceil(rows / _TILE_ROWS))
    seconds = max(_START_SECONDS + weights * each / chip.rate("fp32"), moved / (_STREAMED_SHARE * chip.bandwidth))
    features = (log2(max(weights, 1)), 2 * log2(rows))
    return KernelWork("packed.4bit", features, flop, rate, moved, 1, seconds)


def product_8bit(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a product of 8-bit integers by cuBLASLt: rounds of tiles, one on each multiprocessor."""
    flop, moved = _product(call)
    rows, columns = _result(call)
    depth = flop / 2 / max(rows * columns, 1)
    rounds = ceil(ceil(rows / _INT8_TILE) * ceil(columns / _INT8_TILE) / chip.multiprocessors)
    of_one = _INT8_SHARE * _INT8_TO_HALF * chip.rate("fp16") / chip.multiprocessors
    by_tiles = _START_SECONDS + rounds * 2 * _INT8_TILE**2 * depth / of_one
    seconds = max(by_tiles, moved / (_STREAMED_SHARE * chip.bandwidth))
    features = (log2(max(rows, 1)), log2(max(columns, 1)), log2(max(depth, 1)))
    return KernelWork("packed.8bit", features, 0.0, "fp32", moved, 1, seconds)


def _product(call: Call) -> tuple[float, int]:
    """Return the FLOP and the bytes of a product of rows (the first input) with packed weights."""
    _, columns = _result(call)
    return 2.0 * call.inputs[0].elements * columns, traffic(call).bytes


def _result(call: Call) -> tuple[int, int]:
    """Return the rows and columns of a product."""
    result = [*(call.inputs[position] for position in call.written), *call.outputs][0]
    columns = max(result.shape[-1], 1)
    return result.elements // columns, columns


def update_8bit(call: Call, chip: Chip) -> KernelWork:
    """Return the work of an update with 8-bit states: gradient, parameter, states, code books, scales."""
    gradient = call.inputs[0]
    if gradient.on_host or not gradient.elements:
        return NOTHING
    states = max(sum(tensor.dtype == "uint8" for tensor in call.inputs), 1)
    cycles_of_state = _MEMORY_CYCLES + 2 * _BISECTIONS * _SHARED_CYCLES + _REDUCTION_CYCLES
    cycles = _SERIAL_READS * _MEMORY_CYCLES + states * cycles_of_state
    rounds = ceil(ceil(gradient.elements / _BLOCK) / (chip.multiprocessors * _BLOCKS_HELD))
    moved = traffic(call).bytes
    seconds = max(rounds * cycles / _CLOCK_HZ, moved / (chip.bandwidth * 0.8))
    family = f"bitsandbytes.8.{states} states.{8 * gradient.itemsize}"
    return KernelWork(family, (log2(gradient.elements),), bytes=moved, seconds=seconds)


def update_32bit(call: Call, chip: Chip) -> KernelWork:
    """Return the work of an update with 32-bit states: a kernel that moves data, though not as fast as others."""
    width = 8 * call.inputs[0].itemsize if call.inputs else 32
    return memory_bound(f"bitsandbytes.32.{width}", chip, call) if traffic(call).bytes else NOTHING
