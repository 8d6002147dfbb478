"""What the guides say of every model, shown for the user's from its own operations.

Sources: Hugging Face, "Model training anatomy" and "Methods and tools for efficient training": backward takes about
twice the FLOP of forward; element-wise functions wait for memory (forward reads one tensor and writes one, backward
reads two and writes one).
"""

from __future__ import annotations

from collections import Counter

from trainatomy.analysis.operation_table import Step
from trainatomy.results.operation_breakdown import Claim


def claims(step: Step) -> tuple[Claim, ...]:
    """Those that this step can show: it needs a backward, and an activation function."""
    flop: Counter[str] = Counter()
    for _, operation, work in step.kernels():
        flop[operation.phase] += (work.flop or 0) * operation.repeats
    found = []
    if flop["forward"] and flop["backward"]:
        found.append(_backward(flop))
    activations = _activations(step)
    return (*found, *([activations] if activations is not None else []))


def _backward(flop: Counter[str]) -> Claim:
    ratio = flop["backward"] / flop["forward"]
    if flop["recompute"]:
        again = flop["recompute"] / flop["forward"]
        rest = f"; recomputation adds {again:.2f} forwards"
    else:
        rest = ""
    sentence = (
        f"Backward takes {ratio:.2f} times the FLOP of forward{rest} "
        "(the guides: twice, a gradient of the data and one of the weights for each product)."
    )
    return Claim("backward_to_forward_flop", float(flop["forward"]), float(flop["backward"]), ratio, sentence)


def _activations(step: Step) -> Claim | None:
    """In tensors of the size of what backward writes: reads and writes of the functions that have both directions."""
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    names: dict[str, None] = {}
    for _, operation, work in step.kernels():
        if work.rule is not None and work.rule.activation and operation.phase in ("forward", "backward"):
            direction = work.rule.activation
            read[direction] += work.read * operation.repeats
            written[direction] += work.written * operation.repeats
            names.setdefault(step.operations.calls[operation.call].name.rpartition("::")[2].removesuffix("_"))
    if not written["forward"] or not written["backward"]:
        return None
    forward, backward = (read[way] + written[way] for way in ("forward", "backward"))
    per_forward, per_backward = read["forward"] / written["forward"], read["backward"] / written["backward"]
    sentence = (
        f"Activation functions ({', '.join(sorted(names))}): for each tensor written, forward reads "
        f"{per_forward:.2g} and backward {per_backward:.2g}; backward moves {backward / forward:.2f} times the bytes "
        "(the guides: forward reads one and writes one, backward reads two and writes one: 1.5 times)."
    )
    return Claim("activation_bytes", float(forward), float(backward), backward / forward, sentence)
