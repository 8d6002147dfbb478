"""Calls of ``generate()`` in a simulation: what is remembered of one, and how it is written once more.

A further call with the same prompts does what the first did, except that workspaces exist: it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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


class Copied(NamedTuple):
    """A stretch of a trace that was written again.

    Attributes:
        moved: Numbers of the allocations of the copy, by those of the stretch.
        places: Places of the events of the copy, by those in the stretch; one more for what comes after them.
    """

    moved: dict[int, int]
    places: list[int]


def left_behind(
    trace: AllocationTrace, begin: StepBegin, end: StepBegin, results: Collection[int] = ()
) -> set[int] | None:
    """Return the workspaces that a stretch of a trace left behind, which a repetition does not allocate again.

    None if it freed an allocation of before it, or left more behind than workspaces and its results.
    """
    freed = {event.allocation for event in trace.events[begin.events : end.events] if event.action == "free"}
    kept = set(range(begin.origins, end.origins)).difference(freed, results)
    if min(freed, default=begin.origins) < begin.origins or any(trace.labels.get(one) not in _KEPT for one in kept):
        return None
    return kept


def write_again(
    trace: AllocationTrace,
    begin: StepBegin,
    end: StepBegin,
    left_out: Collection[int],
    step: int,
    phase_of: Callable[[str], str] = str,
) -> Copied:
    """Write a stretch of a trace once more at its end, as a part of ``step``, without the allocations ``left_out``.

    ``phase_of`` returns the phase of the copy of an allocation by that of the original.
    """
    events, moved, places = trace.events[begin.events : end.events], dict[int, int](), list[int]()
    for event in events:
        places.append(len(trace.events))
        number = event.allocation
        if number in left_out:
            continue
        if event.action == "alloc":
            moved[number] = len(trace.origins)
            origin = trace.origins[number]
            trace.origins.append(origin._replace(phase=phase_of(origin.phase), step=step))
            if number in trace.labels:
                trace.labels[moved[number]] = trace.labels[number]
            if number in trace.choices:
                trace.choices[moved[number]] = trace.choices[number]
        trace.events.append(Event(event.action, moved.get(number, number), event.bytes, event.stream))
    places.append(len(trace.events))
    return Copied(moved, places)


def repeat_step(trace: AllocationTrace, begin: StepBegin, operations: Operations, step: int) -> Operations | None:
    """Write the last step of a trace once more, and return its operations there.

    None, and nothing is written, if the step freed an allocation of before it, or left more behind than workspaces.

    Args:
        trace: The trace.
        begin: Where its last step begins.
        operations: The operations of that step.
        step: Number of the copy.
    """
    end, marks = StepBegin(len(trace.events), len(trace.origins), len(trace.marks)), trace.marks[begin.marks :]
    workspaces = left_behind(trace, begin, end)
    if workspaces is None:
        return None
    moved, places = write_again(trace, begin, end, workspaces, step)
    trace.marks.extend(Mark(places[mark.event - begin.events], mark.name, step) for mark in marks)
    copied = [
        one._replace(
            event=places[max(0, one.event - begin.events)],
            outputs=tuple(moved.get(number, number) for number in one.outputs),
        )
        for one in operations.operations
    ]
    return Operations(operations.calls, copied, operations.module_calls, step=step)
