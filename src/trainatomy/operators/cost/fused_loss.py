"""Losses that multiply hidden states with the output layer tile by tile, and store no logits (cut cross-entropy).

Their Triton kernels are assumed to be as fast as cuBLAS's products of the same sizes; no point of them is known.
"""

from __future__ import annotations

from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, number
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
