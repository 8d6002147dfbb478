"""What every allocation on a tape is for.

Labels say it where the run knew (weights, gradients, optimizer states, inputs, workspaces).  The rest follows from when
an allocation was made and what became of it: made in a forward pass (or its recomputation) and still held when that
pass ends, it is an activation saved for backward; anything else made in forward, backward or the optimizer is
temporary.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from trainatomy.results.trace import AllocationTrace

_FOREVER = 1 << 62

#: label -> (component, line of the bill)
LABELLED = {
    "weight": ("weights", "parameters"),
    "buffer": ("weights", "buffers"),
    "weight_copy": ("weights", "16-bit copies kept by autocast"),
    "gradient": ("gradients", "gradients"),
    "optimizer_state": ("optimizer_states", "optimizer states"),
    "input": ("functionality", "inputs"),
    "cublas_workspace": ("functionality", "cuBLAS workspaces"),
    "cublaslt_workspace": ("functionality", "cuBLASLt workspaces"),
}


class Purpose(NamedTuple):
    """Component of the bill, and the line within it."""

    component: str
    line: str


class Lifetimes(NamedTuple):
    """Index of the event that made each allocation, and of the one that released it (a huge number: never)."""

    born: list[int]
    died: list[int]


def lifetimes(trace: AllocationTrace) -> Lifetimes:
    """When each allocation of a tape lived."""
    count = len(trace.origins)
    born, died = [_FOREVER] * count, [_FOREVER] * count
    for index, event in enumerate(trace.events):
        if event.action == "alloc":
            born[event.allocation] = index
        elif event.action == "free":
            died[event.allocation] = index
    return Lifetimes(born, died)


def purposes(trace: AllocationTrace, lives: Lifetimes) -> list[Purpose]:
    """The purpose of each allocation, by its number."""
    ends = {
        "forward": [m.event for m in trace.marks if m.name == "forward end"],
        "recompute": [m.event for m in trace.marks if m.name == "recompute end"],
    }
    return [_purpose(trace, lives, number, ends) for number in range(len(trace.origins))]


def _purpose(trace: AllocationTrace, lives: Lifetimes, number: int, ends: dict[str, list[int]]) -> Purpose:
    label = trace.labels.get(number)
    if label is not None:
        return Purpose(*LABELLED[label]) if label in LABELLED else Purpose("functionality", label)
    phase = trace.origins[number].phase
    if phase in ends:
        later = bisect_right(ends[phase], lives.born[number])
        end = ends[phase][later] if later < len(ends[phase]) else _FOREVER
        if lives.died[number] >= end:
            return Purpose("activations", "saved by recomputation" if phase == "recompute" else "saved for backward")
        return Purpose("temporary", "forward")
    if phase in ("backward", "optimizer"):
        return Purpose("temporary", phase)
    return Purpose("functionality", "kept by the loop")
