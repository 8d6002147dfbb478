"""Whether Inductor pads a product whose sizes are not aligned, which it decides by timing both on the GPU.

Operands that need padding are copied into zeros first, unless the kernel that computes them can write them padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.elementwise import written_seconds
from trainatomy.operators.cost.kernel import Chip, physical_seconds
from trainatomy.results.operations import Array, Call

_LEAST_GAIN = 1.1
"""How many times as long the product must take for padding to pay (torch 2.11-2.15, ``is_padded_faster``)."""


def padding_pays(
    chip: Chip,
    operator: str,
    operands: Sequence[Array],
    shapes: Sequence[tuple[int, ...]],
    is_free: Sequence[bool],
) -> bool:
    """Return whether a padded product is faster.

    Source: torch 2.11-2.15, torch/_inductor/fx_passes/pad_mm.py (``_should_pad``, ``pad_mm``).

    Args:
        chip: The GPU.
        operator: ``aten::mm`` or ``aten::bmm``.
        operands: Both, [M, K] and [K, N], or batches of such.
        shapes: Their padded shapes.
        is_free: For each, whether padding it costs nothing.
    """
    padded, copying = [], 0.0
    for operand, shape, free in zip(operands, shapes, is_free, strict=True):
        if shape == operand.shape:
            padded.append(operand)
            continue
        strides = tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        padded.append(operand._replace(shape=shape, strides=strides))
        if not free:
            filling = kernel_work(Call("aten::zeros", (), (padded[-1],)), chip)
            place = operand._replace(strides=strides)
            copying += physical_seconds(filling, chip) + written_seconds(chip, operand, place)
    seconds = copying + _product_seconds(chip, operator, padded)
    return _product_seconds(chip, operator, operands) > _LEAST_GAIN * seconds


def _product_seconds(chip: Chip, operator: str, operands: Sequence[Array]) -> float:
    first, second = operands
    shape = (*first.shape[:-1], second.shape[-1])
    strides = tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    result = first._replace(shape=shape, strides=strides, storage=max(first.storage, second.storage) + 1)
    return physical_seconds(kernel_work(Call(operator, (first, second), (result,)), chip), chip)
