"""Count the floating-point operations of a call and the bytes that it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.operators.cost.attention import flex_flop
from trainatomy.operators.cost.libraries import fused_loss_flop
from trainatomy.operators.operator import Group, Operator
from trainatomy.operators.registry import operator_of
from trainatomy.operators.traffic import crosses, traffic
from trainatomy.results.operations import Call

_PACKED = ("gemm_4bit", "gemv_4bit", "int8_linear_matmul")
_QUANTISED_PRODUCTS = frozenset(f"bitsandbytes::{name}" for name in _PACKED)
"""Products of activations, the first input, with packed weights, into a tensor that they write."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The work of a call on the GPU, counted.

    Attributes:
        kind: ``kernel``; ``view``, nothing runs; ``host``, it runs on the CPU; ``read``, the CPU reads a value;
            ``transfer``, a copy between host memory and GPU memory.
        operator: the row of a kernel's operator.
        flop: floating-point operations; ``None`` where there is no formula.
        read: bytes that a kernel has to read (``operators.traffic``).
        written: bytes that it has to write.
    """

    kind: Literal["kernel", "view", "host", "read", "transfer"]
    operator: Operator | None = None
    flop: int | None = 0
    read: int = 0
    written: int = 0

    @property
    def group(self) -> Group | None:
        """The group of a kernel."""
        return self.operator.group if self.operator is not None else None

    @property
    def bytes(self) -> int:
        """Compulsory traffic: what kernels move beyond it is only in their predicted time."""
        return self.read + self.written


def count(call: Call) -> Counts:
    """Count the work of a call on the GPU."""
    on_gpu = any(not array.on_host for array in (*call.inputs, *call.outputs))
    operator = operator_of(call)
    if operator.sync == "value":
        return Counts("read" if on_gpu else "host")
    if not on_gpu:
        return Counts("host")
    if call.is_view or not operator.kernel:
        return Counts("view")
    if crosses(call):
        return Counts("transfer")
    return Counts("kernel", operator, flop_of(call, operator), *traffic(call))


def flop_of(call: Call, operator: Operator) -> int | None:
    """Return the floating-point operations of a call, None without a formula.

    PyTorch's registry of formulas comes first; then the grouped product, for which it has none: 2·S·K·N, where each of
    the S rows meets the [K, N] of its group; then products with quantised weights, 2·M·K·N; else the operator's count
    per element.  FlexAttention's are those of the blocks of scores that its mask keeps; those of a loss without
    logits, of all its products.
    """
    if call.flop is not None:
        return call.flop
    if operator.name == "_grouped_mm":
        return _grouped_flop(call) // int(dict(call.numbers).get("shared_by", "1"))
    if operator.name.startswith("flex::"):
        return round(flex_flop(call))
    if operator.name.startswith("cut_cross_entropy::"):
        return fused_loss_flop(call)
    if operator.name in _QUANTISED_PRODUCTS:
        return 2 * call.inputs[0].elements * call.inputs[call.written[0]].shape[-1]
    return None if operator.flop is None else operator.flop * _elements(call)


def _grouped_flop(call: Call) -> int:
    first, second = (array.shape for array in call.inputs[:2])
    if len(first) == len(second) == 2:  # [K, S] x [S, N]: a product for each group, over its rows
        return 2 * first[0] * first[1] * second[1]
    rows = first[0] if len(first) == 2 else first[0] * first[1]
    return 2 * rows * first[-1] * second[-1]


def _elements(call: Call) -> int:
    """Return the elements of the first list, or of the largest tensor."""
    if call.lengths and ("_foreach_" in call.name or "_fused_" in call.name):
        return sum(array.elements for array in call.inputs[: call.lengths[0]])
    return max((array.elements for array in (*call.inputs, *call.outputs)), default=0)
