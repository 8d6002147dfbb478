"""Label the allocations of a real run that no tensor's address identifies: inputs, workspaces, repeated passes.

Notes label weights, gradients and optimizer states by address; these functions infer the rest from the trace.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from trainatomy.analysis.purposes import Lifetimes, lifetimes
from trainatomy.measurement.traces.repeats import attribute_repeated_passes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.catalog.workspaces import Workspaces
    from trainatomy.results.trace import AllocationTrace

_BETWEEN_STEPS = (
    "loaded",
    "step",
    "step end",
    "backward end",
    "zero_grad end",
    "optimizer end",
    "evaluation end",
    "saving end",
    "restoring end",
)
"""Marks after which a loop may move a batch to the GPU."""
_BACKWARD_PHASES = ("backward", "recompute")
_NEVER = 1 << 62
BUFFERS_NOTE = (
    "the measured breakdown has no line for communication buffers: PyTorch shows no addresses of what DataParallel "
    "flattens for its transfers, so they are among activations, gradients and temporary buffers"
)
"""A note on the memory breakdown of a measured training with DataParallel."""


def label_remaining(
    trace: AllocationTrace, sizes: Workspaces | None, tracked_steps: Sequence[int] = ()
) -> tuple[int, ...]:
    """Label inputs and workspaces, and attribute repeated passes to modules.

    Args:
        trace: The trace to label in place.
        sizes: Sizes of the cuBLAS and cuBLASLt workspaces on that GPU.
        tracked_steps: Steps in which module calls were recorded.

    Returns:
        The steps whose modules remain unknown.
    """
    unknown_steps = attribute_repeated_passes(trace, tracked_steps) if tracked_steps else ()
    lives = lifetimes(trace)
    label_inputs(trace, lives)
    label_inputs_of_forward(trace, lives)
    if sizes is not None and not sizes.per_call:
        label_workspaces(trace, lives, "cublas_workspace", sizes.cublas_bytes)
        label_workspaces(trace, lives, "cublaslt_workspace", sizes.cublaslt_bytes)
    return unknown_steps


def label_inputs(trace: AllocationTrace, lives: Lifetimes) -> None:
    """Label as input the memory allocated between steps or micro-batches and alive when the next forward begins.

    Considers phase ``other`` only, and keeps existing labels (an optimizer may create its states before the first
    step).
    """
    forwards = [mark.event for mark in trace.marks if mark.name == "forward"]
    marks = [mark.event for mark in trace.marks]
    for number, origin in enumerate(trace.origins):
        if origin.phase != "other" or number in trace.labels:
            continue
        born = lives.born[number]
        mark, forward = bisect_right(marks, born), bisect_right(forwards, born)
        between = mark > 0 and trace.marks[mark - 1].name in _BETWEEN_STEPS
        if between and forward < len(forwards) and lives.died[number] >= forwards[forward]:
            trace.labels[number] = "input"


def label_inputs_of_forward(trace: AllocationTrace, lives: Lifetimes) -> None:
    """Label as input the memory that a forward allocates before its first module call and still holds then.

    Inference loops move their batch there.  Does nothing for a forward whose modules are unknown.
    """
    for mark in trace.marks:
        if mark.name != "forward":
            continue
        before: list[int] = []
        for index in range(mark.event, len(trace.events)):
            event = trace.events[index]
            if event.action != "alloc":
                continue
            origin = trace.origins[event.allocation]
            if origin.phase != "forward":
                break
            if origin.module:
                held = [number for number in before if lives.died[number] > index and number not in trace.labels]
                trace.labels |= dict.fromkeys(held, "input")
                break
            before.append(event.allocation)


def label_workspaces(trace: AllocationTrace, lives: Lifetimes, label: str, size: int) -> None:
    """Label the first allocation of exactly ``size`` bytes that is never freed, once per thread (forward, backward).

    A workspace is kept until the process ends, and each thread allocates its own at its first matrix product.
    """
    if not size:
        return
    found: set[bool] = set()
    for event in trace.events:
        number = event.allocation
        if event.action != "alloc" or event.bytes != size or lives.died[number] < _NEVER or number in trace.labels:
            continue
        is_backward = trace.origins[number].phase in _BACKWARD_PHASES
        if is_backward not in found:
            found.add(is_backward)
            trace.labels[number] = label
