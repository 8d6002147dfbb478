"""Calls of ``generate()`` in a simulation: what is remembered of one, and how it is written once more.

A further call with the same prompts does what the first did, except that workspaces exist: it is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from trainatomy.results.operations import Operations
from trainatomy.results.trace import AllocationTrace, Event, Mark
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.repeated_layers import RepeatedLayers

_KEPT = frozenset({"cublas_workspace", "cublaslt_workspace"})
"""Labels of what a first call leaves behind for good."""


@dataclass(frozen=True, slots=True)
class ExecutedGeneration:
    """The last call of ``generate()``.

    Attributes:
        sequences: Sequences that were generated at once.
        cache_bytes: Keys and values at the end.
        cache_bytes_per_token: Keys and values of one token of one sequence.
        first_operations: Number of its operations before the second token.
    """

    sequences: int
    cache_bytes: int
    cache_bytes_per_token: int
    first_operations: int

    def prefill(self, operations: Operations) -> Operations:
        """Return those of a call's operations that come before the second token."""
        count = self.first_operations or len(operations.operations)
        whole = sum(one.repeats for one in operations.operations) or 1
        calls = {phase: number * count // whole for phase, number in operations.module_calls.items()}
        return Operations(operations.calls, operations.operations[:count], calls, step=operations.step)


class CallOfGenerate:
    """Follows calls of ``generate()``: the operations of the middle one of further tokens are written for all of them.

    What a token reads grows by the same with each, so that the time of the middle one is the mean.

    Args:
        recorder: Recorder of the run.

    Attributes:
        runs: Whether a call runs.
        cache: Number of sequences in the cache, its bytes, and those of one token of one sequence.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.runs = False
        self.cache = 0, 0, 0
        self._operations = recorder.operations
        self._layers = RepeatedLayers(recorder)
        self._tokens = self._first_operations = 0
        self._writes = False

    def begin(self, model: nn.Module) -> None:
        """Begin a call with the prompts."""
        self.runs, self.cache, self._writes, self._first_operations = True, (0, 0, 0), False, 0
        self._layers.begin(model)

    def token_begin(self, token: int, tokens: int | None) -> None:
        """Begin a further token, from 1; ``tokens``: how many there will be with the first, None: nobody knows."""
        self._layers.token_begin()
        if tokens is None:
            return
        if token == 1:
            self._tokens, self._writes = tokens, self._operations.recording
            self._first_operations = len(self._operations.operations.operations)
        if token == max(1, tokens // 2) and self._writes:
            self._operations.generating, self._operations.repeats = True, tokens - 1
            self._operations.resume()
        else:
            self._operations.pause()

    def end(self) -> ExecutedGeneration:
        """End the call and return what is known of it."""
        self.runs = False
        self._layers.end()
        self._operations.generating, self._operations.repeats = False, 1
        if self._writes:
            self._operations.resume()
        return ExecutedGeneration(*self.cache, self._first_operations)


class StepBegin(NamedTuple):
    """Number of events, allocations and marks of a trace where a step begins."""

    events: int
    origins: int
    marks: int


def repeat_step(trace: AllocationTrace, begin: StepBegin, operations: Operations, step: int) -> Operations | None:
    """Write the last step of a trace once more, and return its operations there.

    None, and nothing is written, if the step freed an allocation of before it, or left more behind than workspaces.

    Args:
        trace: The trace.
        begin: Where its last step begins.
        operations: The operations of that step.
        step: Number of the copy.
    """
    events, origins, marks = trace.events[begin.events :], trace.origins[begin.origins :], trace.marks[begin.marks :]
    freed = {event.allocation for event in events if event.action == "free"}
    kept = set(range(begin.origins, len(trace.origins))) - freed
    if min(freed, default=begin.origins) < begin.origins or any(trace.labels.get(one) not in _KEPT for one in kept):
        return None
    moved: dict[int, int] = {}
    for number, origin in enumerate(origins, begin.origins):
        if number in kept:
            continue
        moved[number] = len(trace.origins)
        trace.origins.append(origin._replace(step=step))
        if number in trace.labels:
            trace.labels[moved[number]] = trace.labels[number]
        if number in trace.choices:
            trace.choices[moved[number]] = trace.choices[number]
    places: list[int] = []
    for event in events:
        places.append(len(trace.events))
        if event.allocation not in kept:
            allocation = moved.get(event.allocation, event.allocation)
            trace.events.append(Event(event.action, allocation, event.bytes, event.stream))
    places.append(len(trace.events))
    trace.marks.extend(Mark(places[mark.event - begin.events], mark.name, step) for mark in marks)
    copied = [
        one._replace(
            event=places[max(0, one.event - begin.events)],
            outputs=tuple(moved.get(number, number) for number in one.outputs),
        )
        for one in operations.operations
    ]
    return Operations(operations.calls, copied, operations.module_calls, step=step)
