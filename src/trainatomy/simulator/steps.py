"""Steps that are written without being executed: further ones, skipped ones, and those before a checkpoint.

Steps that a training goes on with: copies of the last one that was executed.

The allocator's cache may still grow after the steps that are executed, as the blocks that a step finds depend on those
that the one before left.  So the last step is replayed further, until a step begins with the blocks of one before it,
from where on all steps are alike.  The trace gets the copies that a peak lies in, and none where no peak moves.  What
a training did after its last step (an evaluation, a checkpoint) comes after the copies.

Traces of trainings in float16 whose first optimizer steps are skipped, because scaled gradients overflow.

The optimizer makes its states in the first step that is not skipped, when the allocator's cache holds the blocks of the
steps before.  Whether gradients overflow depends on values, so that a run is executed without skipped steps; its trace
is rewritten here: what the optimizer does is left out of the steps that are skipped, and what it did in the first step
is done in the first one that is not.

Trainings that continue from a checkpoint: the checkpoint is that of one simulated step of the same training.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainatomy.allocator.replay import RecordingPlayer, kept, peaks_of, unlimited_replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.results.memory import MOST_SKIPPED_STEPS, Memory, SkippedSteps
from trainatomy.results.trace import AllocationTrace, Event, Mark
from trainatomy.simulator.evaluation import CheckpointFiles
from trainatomy.simulator.pieces import Beginning, Cuts, CutTrace, StepLibrary, Stitched, cut, cuts_of
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.stretches import OLDER, Columns, read, write
from trainatomy.simulator.watcher import Watcher
from trainatomy.training.lengths import BatchShape
from trainatomy.workload.schema import Workload

COPIES = (4, 12)
"""Copies that are tried: a few, and more where they moved a peak and the cache is not stable after them."""
MOST_EVENTS = 2_000_000
"""Events of these copies, of which one is tried in any case: a step that generates text has a million, and a copy takes
seconds.  Later copies of such a step (GRPO, Qwen2.5-0.5B) added one segment of 2 MiB for small blocks."""
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
        cuts = cuts_of(trace, steps - 1, is_kept=True)
    except SimulationError:  # the last step needs what earlier ones made
        return trace
    before, last = cuts.kept_in(steps - 2), cuts.kept_in(cuts.parts[-1].step)
    if _labels(trace, before) != _labels(trace, last):  # it keeps other things than the one before it
        return trace
    copies = _copies_to_peaks(trace, cuts, settings)
    if not copies:
        return trace
    pieces = cut(trace, steps - 1, is_kept=True)
    library, first = StepLibrary({_SHAPE: pieces.steps[-1]}), Beginning.of(trace, pieces)
    longer = library.stitch(first, [(_SHAPE,)] * (1 + copies), detailed=True)
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
    rest = range(trace.marks[end].event, marks[-1].event)
    made = (event.allocation for event in trace.events[rest.start : rest.stop] if event.action == "alloc")
    numbers |= {number: len(copy.origins) + place for place, number in enumerate(made)}
    entries = read(trace, rest, lambda number: (OLDER, number), range(end + 1, len(trace.marks)))
    write(copy, Columns(entries), lambda name: numbers.get(name[1], name[1]), trace.marks[end].step)


def with_copies(trace: AllocationTrace, count: int) -> AllocationTrace:
    """Return a trace with ``count`` copies of its last step.

    Raises:
        SimulationError: Its steps depend on more than the step before them.
    """
    steps = 1 + max(mark.step for mark in trace.marks)
    pieces = cut(trace, steps - 1, is_kept=True)
    library, first = StepLibrary({_SHAPE: pieces.steps[-1]}), Beginning.of(trace, pieces)
    return library.stitch(first, [(_SHAPE,)] * (1 + count), detailed=True).trace


def _labels(trace: AllocationTrace, kept: Sequence[Sequence[int]]) -> list[list[str | None]]:
    """Return the labels of what each part of a step keeps (``Piece.signature``)."""
    return [[trace.labels.get(number) for number in numbers] for numbers in kept]


def _copies_to_peaks(trace: AllocationTrace, cuts: Cuts, settings: AllocatorSettings) -> int:
    """Return the number of copies of the last step after which neither peak grows any more.

    Where there are none, the replay of the trace is kept for its analysis.
    """
    player, last = RecordingPlayer(trace, settings), cuts.parts[-1].step
    begin, end = cuts.end_of(last - 1), cuts.end_of(last)
    player.play(begin)
    seen = {player.allocator.state()}
    player.play(end)
    allocator, needed, copies = player.allocator.copy(), 0, 0
    most = max(1, MOST_EVENTS // max(1, end - begin))
    # a copy releases what the step before it kept where the last step releases what the one before that kept
    of_step_before = {
        theirs: own
        for others, owns in zip(cuts.kept_in(last - 1), cuts.kept_in(last), strict=True)
        for theirs, own in zip(others, owns, strict=True)
    }
    handles = player.handles
    while (state := allocator.state()) not in seen and copies < min(most, COPIES[bool(needed)]):
        seen.add(state)
        copies += 1
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        handles = {theirs: handles.get(own, 0) for theirs, own in of_step_before.items()}
        _play(trace.events[begin:end], allocator, handles)
        if peaks != (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes):
            needed = copies
    if not needed and not settings.refer_to_device:
        unlimited_replay(trace, settings, 0, player)
    return needed


def _play(events: Sequence[Event], allocator: CachingAllocator, handles: dict[int, int]) -> None:
    """Allocate and release what the events of a step say, and keep ``handles`` up to date."""
    for action, number, size, stream in events:
        if action == "alloc":
            handles[number] = allocator.malloc(size, stream)
        elif action == "free":
            allocator.free(handles.pop(number))
        else:
            allocator.empty_cache()


BEGIN, END = "scaled step", "scaled step end"
"""Marks around the step of an optimizer that gradient scaling may skip."""


def optimizer_steps(trace: AllocationTrace) -> Mapping[int, Sequence[range]]:
    """Return the events of what gradient scaling may skip, by the step of the training."""
    found: defaultdict[int, list[range]] = defaultdict(list)
    begins: dict[int, int] = {}
    for mark in trace.marks:
        if mark.name == BEGIN:
            begins[mark.step] = mark.event
        elif mark.name == END:
            found[mark.step].append(range(begins[mark.step], mark.event))
    return found


def makes_states(trace: AllocationTrace) -> bool:
    """Return whether an optimizer whose step may be skipped keeps something that it makes in its first step."""
    kept: set[int] = set()
    for events in optimizer_steps(trace).get(0, ()):
        for event in trace.events[events.start : events.stop]:
            (kept.add if event.action == "alloc" else kept.discard)(event.allocation)
    return bool(kept)


def peaks_with_skipped_steps(
    trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory
) -> tuple[SkippedSteps, ...]:
    """Return the peaks with one skipped step, with two, and so on; none where they do not move.

    Args:
        trace: Allocations of a run without skipped steps.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if not makes_states(trace):
        return ()
    name = "skipped steps", memory.peak_allocated_bytes, memory.peak_reserved_bytes
    return kept(trace, name, settings, gpu_bytes, partial(_with_skipped, trace, settings, gpu_bytes, memory))


def _with_skipped(
    trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory
) -> tuple[SkippedSteps, ...]:
    found = [SkippedSteps(0, memory.peak_allocated_bytes, memory.peak_reserved_bytes)]
    with contextlib.suppress(SimulationError):
        while len(found) <= MOST_SKIPPED_STEPS and (len(found) < 3 or not _same_peaks(found)):
            skipped = with_further_steps(with_skipped_steps(trace, len(found)), settings)
            (peaks,) = peaks_of(skipped, settings, gpu_bytes)
            found.append(SkippedSteps(len(found), *peaks))
    while len(found) > 1 and _same_peaks(found):
        found.pop()
    return tuple(found[1:])


def _same_peaks(found: Sequence[SkippedSteps]) -> bool:
    """Return whether the last skipped step moved no peak."""
    last, before = found[-1], found[-2]
    return (last.allocated_bytes, last.reserved_bytes) == (before.allocated_bytes, before.reserved_bytes)


def with_skipped_steps(trace: AllocationTrace, count: int, after: int = 1) -> AllocationTrace:
    """Return the trace of the same training with its first ``count`` optimizer steps skipped.

    The trace itself is returned where gradient scaling can skip nothing.

    Args:
        trace: Allocations of a run without skipped steps.
        count: Steps that are skipped.
        after: Steps that follow the first one that is not.

    Raises:
        SimulationError: The optimizer's steps cannot be told apart from the rest of the training.
    """
    if not optimizer_steps(trace) or count == 0:
        return trace
    if trace.stream_uses or trace.collectives or trace.pinned:
        raise _unlike("memory waits for other streams, or lies in pinned host memory")
    missing = count + 1 + after - (1 + max(mark.step for mark in trace.marks))
    longer = with_copies(trace, missing) if missing > 0 else trace
    steps = optimizer_steps(longer)
    ranges = [steps.get(step, ()) for step in range(count + 1)]
    if len({len(each) for each in ranges}) != 1:
        raise _unlike("its steps differ")
    for step, each in enumerate(ranges):
        _check(longer, each, is_first=step == 0)
    return _rewritten(longer, ranges)


def _check(trace: AllocationTrace, steps: Sequence[range], *, is_first: bool) -> None:
    """Refuse a step that releases what the rest of the training made, or keeps what another step does not make."""
    for events in steps:
        own: set[int] = set()
        for event in trace.events[events.start : events.stop]:
            if event.action == "alloc":
                own.add(event.allocation)
            elif event.action == "free" and event.allocation not in own:
                raise _unlike("the optimizer releases memory that it did not allocate in the same step")
            else:
                own.discard(event.allocation)
        if own and not is_first:
            raise _unlike("the optimizer keeps more memory in later steps")


def _rewritten(trace: AllocationTrace, ranges: Sequence[Sequence[range]]) -> AllocationTrace:
    """Return the trace without the events in ``ranges``; those of the first step move to the last of them."""
    count = len(ranges) - 1
    left_out = {index for each in ranges for events in each for index in events}
    moved = defaultdict[int, list[range]](list)
    for first, target in zip(ranges[0], ranges[count], strict=True):
        moved[target.start].append(first)
    late = {trace.events[index].allocation for events in ranges[0] for index in events}
    released = (
        event.allocation
        for index, event in enumerate(trace.events[: ranges[count][-1].stop])
        if event.action == "free" and index not in left_out
    )
    if not late.isdisjoint(released):
        raise _unlike("what the optimizer makes is released before the next step")
    found, numbers, places = trace.blank(), dict[int, int](), list[int]()

    def write(event: Event) -> None:
        number = event.allocation
        if event.action == "alloc":
            numbers[number] = len(found.origins)
            origin = trace.origins[number]
            found.origins.append(origin._replace(step=count) if number in late else origin)
        found.events.append(event if number < 0 else event._replace(allocation=numbers[number]))

    for index in range(len(trace.events) + 1):
        places.append(len(found.events))
        for events in moved.get(index, ()):
            for event in trace.events[events.start : events.stop]:
                write(event)
        if index not in left_out and index < len(trace.events):
            write(trace.events[index])
    found.marks = [Mark(places[mark.event], mark.name, mark.step) for mark in trace.marks]
    found.labels = {numbers[number]: label for number, label in trace.labels.items() if number in numbers}
    found.choices = {numbers[number]: choice for number, choice in trace.choices.items() if number in numbers}
    found.trials = {numbers[number]: tried for number, tried in trace.trials.items() if number in numbers}
    return found


def _unlike(reason: str) -> SimulationError:
    return SimulationError(
        f"skipped_steps: this training cannot be predicted with optimizer steps that are skipped: {reason}.\n"
        "Leave skipped_steps out: the prediction then assumes that no float16 gradient overflows"
    )


FIRST_STEP = {
    "train.resume_from_checkpoint": None,
    "train.load_best_model_at_end": False,
    "train.save_strategy": "steps",
    "train.eval_strategy": "no",
    "train.do_eval": False,
    "train.eval_on_start": False,
    "train.gradient_accumulation_steps": 1,
}
"""Settings of the training that makes the checkpoint: it ends with it, after one step."""


@contextlib.contextmanager
def continued(
    workload: Workload, files: CheckpointFiles | None, simulate: Callable[..., Any], rank: int = 0
) -> Iterator[tuple[Workload, CheckpointFiles]]:
    """Yield the training to simulate, and the files that it finds: those of its checkpoint if it continues from one.

    Args:
        workload: The training.
        files: The files, if they are given.
        simulate: Simulates a workload; takes ``steps``, ``watch`` and ``files``.
        rank: The rank that is simulated.

    Raises:
        WorkloadError: The rank needs files of a checkpoint that only rank 0 writes.
    """
    if files is not None or not workload.resumes:
        yield workload, CheckpointFiles() if files is None else files
        return
    if rank > 0:
        raise WorkloadError(
            f"train.resume_from_checkpoint: is simulated for rank 0, not for rank {rank}, which reads what that wrote",
            key="train.resume_from_checkpoint",
        )
    files = CheckpointFiles()
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:

        def watch(recorder: Recorder, steps: int) -> Watcher:
            return _Keeper(recorder, steps, files, Path(folder) / "checkpoint-1")

        simulate(workload.replace(FIRST_STEP), steps=1, watch=watch, files=files, operations=False)
        yield workload.replace("train.resume_from_checkpoint", str(Path(folder) / "checkpoint-1")), files


class _Keeper(Watcher):
    """Observer that moves the checkpoint of a training to another folder.

    Args:
        recorder: Recorder of the simulated process.
        steps: Steps of the training.
        files: What the files contain.
        place: Where the checkpoint goes.
    """

    def __init__(self, recorder: Recorder, steps: int, files: CheckpointFiles, place: Path) -> None:
        super().__init__(recorder, steps)
        self._files = files
        self._place = place

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        super().saving_end(files, folder)
        folder.rename(self._place)
        self._files.moved(folder, self._place)
