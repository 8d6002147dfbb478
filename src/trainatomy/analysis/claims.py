"""Check general statements of training guides against the operations of this step.

Sources: Hugging Face, "Model training anatomy" and "Methods and tools for efficient training": backward takes about
twice the FLOP of forward; element-wise functions are bound by memory (forward reads one tensor and writes one, backward
reads two and writes one).
"""

from __future__ import annotations

from collections import Counter

from trainatomy.analysis.operation_table import OperationTable
from trainatomy.results.operation_breakdown import Claim


def claims(table: OperationTable) -> tuple[Claim, ...]:
    """Return the claims this step can be checked against: it needs a backward pass and an activation function."""
    return tuple(claim for claim in (_backward_flop(table), _activation_bytes(table)) if claim is not None)


def _backward_flop(table: OperationTable) -> Claim | None:
    flop: Counter[str] = Counter()
    for _, operation, work in table.kernels():
        flop[operation.phase] += (work.flop or 0) * operation.repeats
    forward, backward, recompute = (float(flop[phase]) for phase in ("forward", "backward", "recompute"))
    if not forward or not backward:
        return None
    return Claim("backward_to_forward_flop", forward, backward, backward / forward, recompute=recompute or None)


def _activation_bytes(table: OperationTable) -> Claim | None:
    """Compare the traffic of activation functions that run in both directions."""
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    names: set[str] = set()
    for _, operation, work in table.kernels():
        if work.operator is not None and work.operator.activation and operation.phase in ("forward", "backward"):
            direction = work.operator.activation
            read[direction] += work.read * operation.repeats
            written[direction] += work.written * operation.repeats
            names.add(table.operations.calls[operation.call].name.rpartition("::")[2].removesuffix("_"))
    if not written["forward"] or not written["backward"]:
        return None
    forward, backward = (read[way] + written[way] for way in ("forward", "backward"))
    return Claim(
        "activation_bytes",
        float(forward),
        float(backward),
        backward / forward,
        operators=tuple(sorted(names)),
        forward_reads_per_write=read["forward"] / written["forward"],
        backward_reads_per_write=read["backward"] / written["backward"],
    )
