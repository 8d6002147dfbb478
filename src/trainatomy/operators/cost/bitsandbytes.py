"""Kernels of bitsandbytes: quantised weights, and optimizers with one launch for each parameter.

With 8-bit states, a block of 256 threads works on 256 elements, which share a scale for each state. It reads states,
gradient and code books one after the other with barriers between them, finds the new scales by a reduction, reads and
writes the parameter, and looks up each new state in a code book of 256 by bisection, in shared memory. That is a chain
of latencies: throughput follows from how many blocks a multiprocessor holds at a time, which the kernel's registers
limit. The traffic alone would be a third of the time.

Sources: csrc/kernels.cu of bitsandbytes 0.45 to 0.50 (``kOptimizerStatic8bit2StateBlockwise``, ``quantize_2D``);
latencies: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture"
(arXiv 2402.13499).  Measured: random sizes on an H200 (benchmarks/timing/records/kernels-h200.jsonl.gz).
"""

from __future__ import annotations

from math import ceil, log2

from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, name_of
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Call

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


_MMA_SHARE = 0.63
"""Share of the peak of tensor cores that kernels without Hopper's asynchronous instructions (``mma.sync``) reach on an
H100 on average: Luo et al. (above)."""
_CUBLASLT_SHARE, _STREAMED_SHARE = 0.7, 0.8
"""Assumed: shares of the peak and of the bandwidth that cuBLAS reaches with 16-bit numbers."""
_INT8_TO_HALF = 2.0
"""Rate of 8-bit integers on tensor cores relative to 16-bit numbers: data sheets of T4, A100, H100."""


def conversion(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a kernel that quantises or dequantises: traffic of packed and of plain numbers."""
    if not traffic(call).bytes:
        return NOTHING
    way = "quantise" if "quant" in name_of(call) and "dequant" not in name_of(call) else "dequantise"
    return memory_bound(f"traffic.plain.mixed.bitsandbytes.{way}", chip, call)


def product_4bit(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a product with 4-bit weights, which the kernel unpacks in registers.

    bitsandbytes chooses it where there are few rows, so that reading the weights bounds it (``gemm_4bit.cu``).
    """
    rows, (flop, moved) = call.inputs[0], _product(call)
    rate = chip.precision(rows.dtype)
    seconds = max(flop / (_MMA_SHARE * chip.rate(rate)), moved / (_STREAMED_SHARE * chip.bandwidth))
    return KernelWork("matmul.4bit", (log2(max(flop, 1)),), flop, rate, moved, 1, seconds)


def product_8bit(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a product of 8-bit integers by cuBLASLt."""
    flop, moved = _product(call)
    seconds = max(
        flop / (_CUBLASLT_SHARE * _INT8_TO_HALF * chip.rate("fp16")), moved / (_STREAMED_SHARE * chip.bandwidth)
    )
    return KernelWork("matmul.8bit", (log2(max(flop, 1)),), 0.0, "fp32", moved, 1, seconds)


def _product(call: Call) -> tuple[float, int]:
    """Return the FLOP and the bytes of a product of rows (the first input) with packed weights."""
    results = [call.inputs[position] for position in call.written] or [*call.outputs]
    columns = results[0].shape[-1]
    return 2.0 * call.inputs[0].elements * columns, traffic(call).bytes


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
