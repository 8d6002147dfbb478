"""What a real tape's allocations are for, where no tensor's address told it: inputs, workspaces, passes that repeat.

A note tells which tensors are weights, gradients, optimizer states.  The rest is read off the tape itself.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from trainatomy.analysis.purposes import Lifetimes, lifetimes
from trainatomy.measurement.traces.echo import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.catalog.workspaces import Workspaces
    from trainatomy.results.trace import AllocationTrace

BETWEEN_STEPS = ("loaded", "step", "step end", "backward end", "zero_grad end", "optimizer end")
"""Marks after which a loop may move a batch to the device."""
BACKWARD_THREAD = ("backward", "recompute")
FOREVER = 1 << 62


def label_the_rest(trace: AllocationTrace, sizes: Workspaces | None, followed: Sequence[int] = ()) -> tuple[int, ...]:
    """Label inputs and workspaces; give passes that repeat one of a ``followed`` step its modules.

    ``sizes``: of the workspaces of cuBLAS and cuBLASLt on that card; ``followed``: the steps whose modules were noted.
    Returns the steps whose modules are not known.
    """
    strangers = echo(trace, followed) if followed else ()
    lives = lifetimes(trace)
    label_inputs(trace, lives)
    label_inputs_of_forward(trace, lives)
    if sizes is not None and not sizes.per_call:
        label_workspaces(trace, lives, "cublas_workspace", sizes.cublas_bytes)
        label_workspaces(trace, lives, "cublaslt_workspace", sizes.cublaslt_bytes)
    return strangers


def label_inputs(trace: AllocationTrace, lives: Lifetimes) -> None:
    """What is allocated between steps (or micro-batches) and is there when the next forward begins came as its input.

    Only phase ``other`` counts; what another label names (optimizer states that are made before the first step) stays.
    """
    starts = [mark.event for mark in trace.marks if mark.name == "forward"]
    places = [mark.event for mark in trace.marks]
    for number, origin in enumerate(trace.origins):
        if origin.phase != "other" or number in trace.labels:
            continue
        born = lives.born[number]
        mark, following = bisect_right(places, born), bisect_right(starts, born)
        between = mark > 0 and trace.marks[mark - 1].name in BETWEEN_STEPS
        if between and following < len(starts) and lives.died[number] >= starts[following]:
            trace.labels[number] = "input"


def label_inputs_of_forward(trace: AllocationTrace, lives: Lifetimes) -> None:
    """What a forward allocates before its first module is called, and still holds then, came as its input: the loop of
    inference moves its batch there. Says nothing of a forward whose modules are not known."""
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
    """The first allocation of exactly ``size`` bytes that is never given back, in forward's thread and in backward's.

    A workspace is kept until the process ends, and each thread takes its own at its first matrix product.
    """
    if not size:
        return
    found: set[bool] = set()
    for event in trace.events:
        number = event.allocation
        if event.action != "alloc" or event.bytes != size or lives.died[number] < FOREVER or number in trace.labels:
            continue
        thread = trace.origins[number].phase in BACKWARD_THREAD
        if thread not in found:
            found.add(thread)
            trace.labels[number] = label
