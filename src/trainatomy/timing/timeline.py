"""Replay one step on its timelines: the CPU launches operations, and the GPU executes them with one queue per stream.

A kernel starts when the CPU has launched it, the kernel before it in the same stream has finished, and so have the
operations of other streams that it depends on (``Operations.dependencies``).  Streams run side by side at full speed;
that kernels share the GPU's multiprocessors is not modelled.

A collective takes its stream as a kernel does; other ranks are taken to be as fast as this one, so that none waits for
another.

The CPU runs ahead of the GPU until a stream's launch queue is full, or until it reads a value (``loss.item()``, a NaN
check) or copies a batch: then it waits for the stream of that operation.  Streams do not wait for stream 0 implicitly,
because PyTorch's streams are created with ``cudaStreamNonBlocking`` (c10/cuda/CUDAStream.cpp).  ``cudaFree`` waits for
all streams.

The step ends when the CPU and every stream are done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainatomy.operators.registry import find
from trainatomy.operators.traffic import is_asynchronous
from trainatomy.results.operations import Call, Operations
from trainatomy.timing.launch import CPUCosts, batch_bytes

LAUNCH_QUEUE_DEPTH = 1024
"""Kernels of a stream that can be launched and not yet started; a launch beyond that blocks the CPU.  Not documented;
the depth at which launches begin to block on GPUs since 2017 (CUDA 9 and later)."""

SAME_STATE = 1e-10
"""Difference of what two repetitions of a micro-batch leave, as a share of its duration, up to which they are alike."""

FEWEST_REPEATED = 2
"""Repetitions that are left and worth not being replayed."""

COLLECTIVES = "nccl::"
"""Namespace of the operations that communicate with other GPUs."""

_BACKWARD_PHASES = frozenset({"backward", "recompute"})


@dataclass(slots=True)
class StepTimeline:
    """The outcome of replaying a step, in seconds.

    Attributes:
        seconds: From the end of the previous step to the end of this one.
        cpu_seconds: Time the CPU was busy, waits excluded.
        gpu_seconds: Time during which at least one stream was executing.
        phase_gpu_seconds: Sum of kernel durations by phase.
        communication_seconds: Sum of the durations of collectives.
        exposed_seconds: Time during which collectives were executing and nothing else.
    """

    seconds: float
    cpu_seconds: float
    gpu_seconds: float
    phase_gpu_seconds: dict[str, float]
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0


def blocks_cpu(call: Call) -> bool:
    """Return whether the CPU waits at this call until the GPU has caught up."""
    if is_asynchronous(call):
        return False
    operator = find(call.name)
    if operator is not None and operator.sync:
        return any(not array.on_host for array in call.inputs)
    if batch_bytes(call) or _counts_a_mask(call):
        return True
    return bool(call.outputs) and call.outputs[0].on_host and any(not array.on_host for array in call.inputs)


def _counts_a_mask(call: Call) -> bool:
    """Return whether the call is ``tensor[mask]``: its output size depends on values, through ``nonzero`` inside it."""
    return call.name == "aten::index" and any(
        array.dtype in ("bool", "uint8") and not array.on_host for array in call.inputs[1:]
    )


def replay_step(
    operations: Operations,
    launch_seconds: Sequence[float],
    kernels: Sequence[tuple[float, int]],
    costs: CPUCosts,
    loop_seconds: Mapping[str, float],
    synchronized: Collection[int] = (),
) -> StepTimeline:
    """Replay the step twice, so that it starts as in the middle of a training, and return the second timeline.

    Args:
        operations: The operations of one rank's step.
        launch_seconds: CPU time to launch each operation.
        kernels: For each of ``operations.calls``, seconds on the GPU and number of kernels.
        costs: CPU costs; ``read`` and ``launch_delay`` are used here.
        loop_seconds: CPU time that the training loop adds to each ``step`` and ``micro_step``.
        synchronized: Indices of operations before which the CPU waits for all streams, because memory is freed.
    """
    order = operations.unrolled()
    blocking = [blocks_cpu(call) for call in operations.calls]
    loop_position = _position_of_loop_work(operations, order, blocking)
    work = _work_of_loop(operations, loop_position, loop_seconds)
    rows = [
        _Row(seconds, *kernels[one.call], one.phase, one.stream, blocking[one.call], index in synchronized)
        for index, (one, seconds) in enumerate(zip(operations.operations, launch_seconds, strict=True))
    ]
    communicates = any(call.name.startswith(COLLECTIVES) for call in operations.calls)
    is_alone = len({one.stream for one in operations.operations}) == 1 and not operations.dependencies
    is_alone = is_alone and not communicates
    replay = _replay_one_stream if is_alone else _replay_streams
    return replay(operations, order, rows, work, costs)


class _Row(NamedTuple):
    """An operation as a replay sees it; ``blocks``: the CPU waits for it, ``waits``: it waits for all streams first."""

    launch: float
    seconds: float
    kernels: int
    phase: str
    stream: int
    blocks: bool
    waits: bool


def _work_of_loop(
    operations: Operations, loop_position: int, loop_seconds: Mapping[str, float]
) -> dict[int, list[float]]:
    """Return the CPU time that the training loop adds before operations, by their places in the unrolled step."""
    work = {loop_position: [loop_seconds["step"]]}
    place, micro_step = 0, -1
    for repeats, block in operations.blocks():
        micro_steps = [operations.operations[index].micro_step for index in block]
        begins = [later for later in range(1, len(block)) if micro_steps[later] != micro_steps[later - 1]]
        for repetition in range(repeats):
            is_new = repetition or micro_steps[0] != micro_step
            for begin in (0, *begins) if is_new else begins:
                work.setdefault(place + begin, []).append(loop_seconds["micro_step"])
            place, micro_step = place + len(block), micro_steps[-1]
    return work


def _replay_streams(
    operations: Operations,
    order: Sequence[int],
    rows: Sequence[_Row],
    work: Mapping[int, Sequence[float]],
    costs: CPUCosts,
) -> StepTimeline:
    """Replay a step with any number of streams."""
    timelines = _Timelines(operations, costs.launch_delay)
    for _ in range(2):
        began = timelines.end
        timelines.start_recording()
        for place, index in enumerate(order):
            row = rows[index]
            for seconds in work.get(place, ()):
                timelines.run_on_cpu(seconds)
            if row.waits:
                timelines.wait_for(timelines.streams.values())
            timelines.await_operations(index)
            timelines.run_on_cpu(row.launch)
            timelines.launch(index, row)
            if row.blocks:
                timelines.wait_for([timelines.streams[row.stream]])
                timelines.run_on_cpu(costs.read)
    busy = timelines.gpu_busy()
    return StepTimeline(
        timelines.end - began,
        timelines.cpu_busy,
        busy,
        timelines.phase_gpu_seconds,
        timelines.communication_seconds,
        max(busy - _covered(timelines.computing), 0.0) if timelines.communication_seconds else 0.0,
    )


def _replay_one_stream(
    operations: Operations,
    order: Sequence[int],
    rows: Sequence[_Row],
    work: Mapping[int, Sequence[float]],
    costs: CPUCosts,
) -> StepTimeline:
    """Replay a step on one stream: as ``_replay_streams`` does, many times as fast."""
    stream = _OneStream(costs, dict.fromkeys((row.phase for row in rows), 0.0))
    passes = _passes(operations, rows, work)
    for _ in range(2):
        began = stream.end
        stream.start_recording()
        place = 0
        while place < len(passes):
            place += stream.run(passes, place)
    return StepTimeline(stream.end - began, stream.cpu_busy, stream.gpu_busy, stream.phases)


class _Pass(NamedTuple):
    """Operations that are launched one after the other, with the loop's work before some; ``alike``: equal passes next.

    Passes over the same micro-batch share their rows.
    """

    rows: Sequence[_Row]
    work: Mapping[int, Sequence[float]]
    alike: int


def _passes(operations: Operations, rows: Sequence[_Row], work: Mapping[int, Sequence[float]]) -> list[_Pass]:
    """Return a step as passes, one for each repetition of a micro-batch."""
    places = sorted(work)
    found: list[tuple[Sequence[_Row], dict[int, Sequence[float]]]] = []
    place = 0
    for repeats, block in operations.blocks():
        own = [rows[index] for index in block]
        for _ in range(repeats):
            within = places[bisect_left(places, place) : bisect_left(places, place + len(own))]
            found.append((own, {each - place: work[each] for each in within}))
            place += len(own)
    passes: list[_Pass] = []
    for repeated, extra in reversed(found):
        is_alike = passes and passes[-1].rows is repeated and passes[-1].work == extra
        passes.append(_Pass(repeated, extra, passes[-1].alike + 1 if is_alike else 0))
    return passes[::-1]


class _OneStream:
    """The CPU's timeline and that of the only stream, in seconds from the start of the replay."""

    def __init__(self, costs: CPUCosts, phases: dict[str, float]) -> None:
        self.cpu = self.gpu = self.cpu_busy = self.gpu_busy = 0.0
        self.phases = phases
        self._costs = costs
        self._queue: deque[tuple[float, int]] = deque()
        self._queued = 0

    @property
    def end(self) -> float:
        """The time at which the CPU and the stream are done."""
        return max(self.cpu, self.gpu)

    def start_recording(self) -> None:
        """Reset the busy times."""
        self.cpu_busy = self.gpu_busy = 0.0
        self.phases = dict.fromkeys(self.phases, 0.0)

    def run(self, passes: Sequence[_Pass], place: int) -> int:
        """Replay a pass and those like it; return how many these are.

        They are replayed until one leaves the timelines as it found them, only later; the others then do the same.
        Because an operation starts at a maximum of sums of earlier times and durations, a difference in what a pass
        finds never grows, so that the error of the sum is at most ``SAME_STATE`` of it.
        """
        one, count = passes[place], passes[place].alike + 1
        state: list[float] = []
        for done in range(1, count + 1):
            before = self._figures()
            self._launch(one)
            if count - done < FEWEST_REPEATED:
                continue
            found, state = state, self._state()
            tolerance = SAME_STATE * (self.cpu - before[0])
            if len(found) == len(state) and all(
                abs(new - old) <= tolerance for new, old in zip(state, found, strict=True)
            ):
                self._repeat(before, count - done)
                break
        return count

    def _state(self) -> list[float]:
        """Return what later operations depend on, relative to the CPU's time."""
        waiting = [number for end, count in self._queue for number in (end - self.cpu, float(count))]
        return [self.gpu - self.cpu, *waiting]

    def _figures(self) -> list[float]:
        return [self.cpu, self.cpu_busy, self.gpu_busy, *self.phases.values()]

    def _repeat(self, before: Sequence[float], times: int) -> None:
        """Add to all figures ``times`` what was added to them since ``before``."""
        cpu, *_ = now = self._figures()
        passed = times * (cpu - before[0])
        self.cpu += passed
        self.gpu += passed
        self._queue = deque((end + passed, count) for end, count in self._queue)
        _, self.cpu_busy, self.gpu_busy, *spent = (
            new + times * (new - old) for new, old in zip(now, before, strict=True)
        )
        self.phases = dict(zip(self.phases, spent, strict=True))

    def _launch(self, one: _Pass) -> None:
        """Replay a pass: the hot loop."""
        cpu, end, cpu_busy, gpu_busy = self.cpu, self.gpu, self.cpu_busy, self.gpu_busy
        queue, queued, phases, work = self._queue, self._queued, self.phases, one.work
        delay, read = self._costs.launch_delay, self._costs.read
        for place, (launch, seconds, kernels, phase, _, blocks, waits) in enumerate(one.rows):
            if place in work:
                for extra in work[place]:
                    cpu += extra
                    cpu_busy += extra
            if waits:
                cpu = max(cpu, end)
                queue.clear()
                queued = 0
            cpu += launch
            cpu_busy += launch
            if kernels:
                queued += kernels
                ready = cpu + delay
                end = (ready if ready > end else end) + seconds
                gpu_busy += seconds
                phases[phase] += seconds
                queue.append((end, kernels))
                while queue and (queue[0][0] <= cpu or queued > LAUNCH_QUEUE_DEPTH):
                    done, count = queue.popleft()
                    cpu = done if done > cpu else cpu
                    queued -= count
            if blocks:
                cpu = max(cpu, end) + read
                cpu_busy += read
                queue.clear()
                queued = 0
        self.cpu, self.gpu, self.cpu_busy, self.gpu_busy, self._queued = cpu, end, cpu_busy, gpu_busy, queued


def _position_of_loop_work(operations: Operations, order: Sequence[int], blocking: Sequence[bool]) -> int:
    """Return where in ``order`` the loop does most of its own work of a step; 0 if there is no backward pass.

    That is after backward, once the Trainer has checked the loss for NaN, for which it waits: it then walks all
    parameters to clip their gradients, and the GPU is idle meanwhile.
    """
    after = next(
        (
            place + 1
            for place in reversed(range(len(order)))
            if operations.operations[order[place]].phase in _BACKWARD_PHASES
        ),
        0,
    )
    found = after
    for place in range(after, len(order)) if after else ():
        operation = operations.operations[order[place]]
        if operation.phase == "optimizer":
            break
        if blocking[operation.call]:
            found = place + 1
    return found


@dataclass(slots=True)
class _Stream:
    """The work queued on one CUDA stream.

    Attributes:
        end: When everything launched so far is done.
        queue: End and number of kernels of each operation that has not started, as far as the CPU knows.
        queued: Number of kernels in ``queue``.
    """

    end: float = 0.0
    queue: deque[tuple[float, int]] = field(default_factory=deque)
    queued: int = 0


class _Timelines:
    """The CPU's timeline and one for each stream, in seconds from the start of the replay.

    Attributes:
        intervals: Begin and end of each operation on any stream since recording started.
        computing: The same of those that are no collectives.
        communication_seconds: Sum of the durations of collectives since then.
    """

    def __init__(self, operations: Operations, launch_delay: float) -> None:
        self.cpu = self.cpu_busy = 0.0
        self.streams = {stream: _Stream() for stream in {operation.stream for operation in operations.operations}}
        self.phase_gpu_seconds: dict[str, float] = {}
        self.communication_seconds = self._kernel_seconds = 0.0
        self.intervals: list[tuple[float, float]] = []
        self.computing: list[tuple[float, float]] = []
        self._communicates = [
            operations.calls[operation.call].name.startswith(COLLECTIVES) for operation in operations.operations
        ]
        self._launch_delay = launch_delay
        self._dependencies = operations.dependencies
        self._cpu_waits = operations.cpu_waits
        waits = (*operations.dependencies.values(), *operations.cpu_waits.values())
        self._awaited = {index for indices in waits for index in indices}
        self._ends: dict[int, float] = {}

    @property
    def end(self) -> float:
        """The time at which the CPU and all streams are done."""
        return max(self.cpu, *(stream.end for stream in self.streams.values())) if self.streams else self.cpu

    def start_recording(self) -> None:
        """Reset the busy times of the CPU and the streams."""
        self.cpu_busy = self.communication_seconds = self._kernel_seconds = 0.0
        self.phase_gpu_seconds = {}
        self.intervals.clear()
        self.computing.clear()

    def run_on_cpu(self, seconds: float) -> None:
        """Let the CPU work."""
        self.cpu += seconds
        self.cpu_busy += seconds

    def launch(self, index: int, row: _Row) -> None:
        """Queue the kernels of an operation on its stream; the CPU waits while the queue is full."""
        stream = self.streams[row.stream]
        for dependency in self._dependencies.get(index, ()):  # a view waits, too: what comes after it has to
            stream.end = max(stream.end, self._ends.get(dependency, 0.0))
        if row.kernels:
            stream.queued += row.kernels
            begin = max(stream.end, self.cpu + self._launch_delay)
            stream.end = begin + row.seconds
            stream.queue.append((stream.end, row.kernels))
            self.intervals.append((begin, stream.end))
            self._kernel_seconds += row.seconds
            if self._communicates[index]:
                self.communication_seconds += row.seconds
            else:
                self.computing.append((begin, stream.end))
            while stream.queue and (stream.queue[0][0] <= self.cpu or stream.queued > LAUNCH_QUEUE_DEPTH):
                done, count = stream.queue.popleft()
                self.cpu = max(self.cpu, done)
                stream.queued -= count
        if index in self._awaited:
            self._ends[index] = stream.end
        spent = self.phase_gpu_seconds.get(row.phase, 0.0)
        self.phase_gpu_seconds[row.phase] = spent + (row.seconds if row.kernels else 0.0)

    def await_operations(self, index: int) -> None:
        """Let the CPU wait for the operations that it has to wait for before it launches one."""
        for awaited in self._cpu_waits.get(index, ()):
            self.cpu = max(self.cpu, self._ends.get(awaited, 0.0))

    def wait_for(self, streams: Iterable[_Stream]) -> None:
        """Let the CPU wait until these streams are done."""
        for stream in streams:
            self.cpu = max(self.cpu, stream.end)
            stream.queue.clear()
            stream.queued = 0

    def gpu_busy(self) -> float:
        """Return the time during which at least one stream was executing."""
        if len(self.streams) == 1:
            return self._kernel_seconds
        return _covered(self.intervals)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that intervals cover together."""
    covered, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return covered
