"""Steps that a training goes on with: copies of the last one that was executed.

The allocator's cache may still grow after the steps that are executed, as the blocks that a step finds depend on those
that the one before left.  So the last step is replayed further, until a step begins with the blocks of one before it,
from where on all steps are alike.  The trace gets the copies that a peak lies in, and none where no peak moves.  What
a training did after its last step (an evaluation, a checkpoint) comes after the copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainatomy.allocator.player import Player
from trainatomy.allocator.replay import library_moments
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.errors import SimulationError
from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.pieces import CutTrace, cut
from trainatomy.simulator.stitching import Beginning, StepLibrary, Stitched
from trainatomy.training.lengths import BatchShape

COPIES = (4, 12)
"""Copies that are tried: a few, and more where they moved a peak and the cache is not stable after them."""
_SHAPE = BatchShape(0, 0, is_mixed=False)
"""Stands for the shape of all batches."""


def with_further_steps(trace: AllocationTrace, settings: AllocatorSettings) -> AllocationTrace:
    """Return a trace of some steps with as many copies of the last one as its peaks need.

    The trace itself is returned where no peak moves, and where its steps depend on more than the step before them.
    """
    if trace.stream_uses or trace.collectives or trace.pinned:
        return trace
    steps = 1 + max((mark.step for mark in trace.marks if mark.name == "step end"), default=-1)
    if steps < 2:
        return trace
    try:
        pieces = cut(trace, steps - 1, is_kept=True)
        library, first = StepLibrary({_SHAPE: pieces.steps[-1]}), Beginning.of(trace, pieces)
        needed = _steps_to_peaks(library.stitched(first, [(_SHAPE,)] * (1 + COPIES[-1])), settings, steps)
    except SimulationError:  # the last step keeps other things than the one before it, or needs what earlier ones made
        return trace
    if needed == steps:
        return trace
    longer = library.stitch(first, [(_SHAPE,)] * (1 + needed - steps), detailed=True)
    _append_rest(trace, pieces, longer)
    return longer.trace


def _append_rest(trace: AllocationTrace, pieces: CutTrace, longer: Stitched) -> None:
    """Write what a trace has after its last step at the end of a longer one."""
    end = max(place for place, mark in enumerate(trace.marks) if mark.name == "step end")
    marks, copy = trace.marks[end + 1 :], longer.trace
    if not marks:
        return
    numbers = {
        old: new
        for olds, news in zip(pieces.kept_last, longer.kept, strict=True)
        for old, new in zip(olds, news, strict=True)
    }
    begin, moved = trace.marks[end].event, len(copy.events) - trace.marks[end].event
    for event in trace.events[begin : marks[-1].event]:
        number = event.allocation
        if event.action == "alloc":
            numbers[number] = len(copy.origins)
            copy.origins.append(trace.origins[number])
            if number in trace.labels:
                copy.labels[numbers[number]] = trace.labels[number]
            if number in trace.choices:
                copy.choices[numbers[number]] = trace.choices[number]
        copy.events.append(event._replace(allocation=numbers.get(number, number)))
    copy.marks += [mark._replace(event=mark.event + moved) for mark in marks]


def with_copies(trace: AllocationTrace, count: int) -> AllocationTrace:
    """Return a trace with ``count`` copies of its last step.

    Raises:
        SimulationError: Its steps depend on more than the step before them.
    """
    steps = 1 + max(mark.step for mark in trace.marks)
    pieces = cut(trace, steps - 1, is_kept=True)
    library, first = StepLibrary({_SHAPE: pieces.steps[-1]}), Beginning.of(trace, pieces)
    return library.stitch(first, [(_SHAPE,)] * (1 + count), detailed=True).trace


def _steps_to_peaks(longer: Iterator[Stitched], settings: AllocatorSettings, executed: int) -> int:
    """Return the number of steps after which neither peak grows any more.

    Args:
        longer: The trace, which grows by a step each time.
        settings: Settings of the allocator.
        executed: Steps of the run.
    """
    allocator = CachingAllocator(settings)
    player: Player | None = None
    needed, found, step = executed, (0, 0), 0
    seen: set[tuple[int, frozenset[tuple[int, int]]]] = set()
    for stitched in longer:
        if len(stitched.step_ends) < executed:
            continue
        if player is None:
            player = Player(stitched.trace, allocator, library_moments(stitched.trace, allocator))
        for end in stitched.step_ends[step:]:
            step += 1
            player.play(end)
            before, found = found, (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
            if step > executed and found != before:
                needed = step
        blocks = allocator.reserved_bytes, allocator.live_blocks()
        if blocks in seen or (step == executed + COPIES[0] and needed == executed):
            break
        seen.add(blocks)
    return needed
