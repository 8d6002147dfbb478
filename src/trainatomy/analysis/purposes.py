"""Assign every allocation of a trace to a component of the memory breakdown.

Labels decide where the run knew the purpose (weights, gradients, optimizer states, inputs, workspaces).  The rest
follows from when an allocation was made and freed: one that was made in a forward pass (or its recomputation) and is
still held when that pass ends is an activation saved for backward; anything else made in forward, backward or the
optimizer is temporary.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from trainatomy.results.trace import AllocationTrace

_NEVER = 1 << 62

LABELLED = {
    "weight": ("weights", "parameters"),
    "buffer": ("weights", "buffers"),
    "reference_weight": ("weights", "reference model"),
    "average_weight": ("weights", "moving average"),
    "replica_weight": ("weights", "replica of this step"),
    "scale": ("weights", "scales of quantised weights"),
    "weight_copy": ("weights", "16-bit copies kept by autocast"),
    "gradient": ("gradients", "gradients"),
    "optimizer_state": ("optimizer_states", "optimizer states"),
    "master_weight": ("optimizer_states", "fp32 master weights"),
    "gathered_weight": ("gathered_weights", "gathered weights"),
    "communication_buffer": ("communication_buffers", "communication buffers"),
    "key_value_cache": ("key_value_cache", "keys and values"),
    "input": ("functionality", "inputs"),
    "cublas_workspace": ("functionality", "cuBLAS workspaces"),
    "cublaslt_workspace": ("functionality", "cuBLASLt workspaces"),
}
"""Component and line of the memory breakdown by label."""


_FORWARDS = ("evaluation forward", "evaluation forward end")
"""Marks around the forward of an evaluation batch."""


class Purpose(NamedTuple):
    """A component of the memory breakdown, and a line within it."""

    component: str
    line: str


class Lifetimes(NamedTuple):
    """Index of the events that made and that freed each allocation (a huge number if never)."""

    born: list[int]
    died: list[int]


def lifetimes(trace: AllocationTrace) -> Lifetimes:
    """Return when each allocation of a trace was made and freed."""
    count = len(trace.origins)
    born, died = [_NEVER] * count, [_NEVER] * count
    for index, event in enumerate(trace.events):
        if event.action == "alloc":
            born[event.allocation] = index
        elif event.action == "free":
            died[event.allocation] = index
    return Lifetimes(born, died)


def purposes(trace: AllocationTrace, lives: Lifetimes) -> list[Purpose]:
    """Return the purpose of each allocation, by its number."""
    ends = {
        "forward": [m.event for m in trace.marks if m.name == "forward end"],
        "recompute": [m.event for m in trace.marks if m.name == "recompute end"],
    }
    evaluated = [(m.event, m.name) for m in trace.marks if m.name in _FORWARDS]
    ends["evaluation"] = [event for event, name in evaluated if name == _FORWARDS[1]]
    begins = [event for event, name in evaluated if name == _FORWARDS[0]]
    return [_purpose(trace, lives, number, ends, begins) for number in range(len(trace.origins))]


def _purpose(
    trace: AllocationTrace, lives: Lifetimes, number: int, ends: dict[str, list[int]], begins: list[int]
) -> Purpose:
    label = trace.labels.get(number)
    if label is not None:
        return Purpose(*LABELLED[label]) if label in LABELLED else Purpose("functionality", label)
    phase = trace.origins[number].phase
    if phase == "evaluation":
        return _in_evaluation(lives.born[number], lives.died[number], begins, ends[phase])
    if phase in ends:
        later = bisect_right(ends[phase], lives.born[number])
        end = ends[phase][later] if later < len(ends[phase]) else _NEVER
        if lives.died[number] >= end:
            return Purpose("activations", "saved by recomputation" if phase == "recompute" else "saved for backward")
        return Purpose("temporary", "forward")
    if phase in ("backward", "optimizer", "prefill", "decode", "saving", "restoring"):
        return Purpose("temporary", phase)
    return Purpose("functionality", "kept by the loop")


def _in_evaluation(born: int, died: int, begins: list[int], ends: list[int]) -> Purpose:
    """Return the purpose of an allocation of an evaluation: temporary, if it dies in the forward that made it."""
    forwards, done = bisect_right(begins, born), bisect_right(ends, born)
    if forwards > done and (done >= len(ends) or died < ends[done]):
        return Purpose("temporary", "evaluation")
    return Purpose("gathered_outputs", "outputs gathered by evaluation")
