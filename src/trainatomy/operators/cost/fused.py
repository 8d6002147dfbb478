"""Kernels that PyTorch's compiler writes: what they move, and what they compute for each element.

Arrays are read and written once: what several operators compute stays in registers.  Arithmetic and traffic overlap in
part, so that the time is the root of the sum of their squares.  An array whose neighbours lie apart takes longer than
this says: kernels that read it in another order, as ConvNeXt's permuted norms do, are up to four times as long.
"""

from __future__ import annotations

from math import hypot, log2
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, number, passes_to
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Call


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
