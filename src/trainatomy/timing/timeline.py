"""Replay one step on its timelines: the CPU launches operations, and the GPU executes them with one queue per stream.

A kernel starts when the CPU has launched it, the kernel before it in the same stream has finished, and so have the
operations of other streams that it depends on (``Operations.dependencies``).  Streams run side by side at full speed;
that kernels share the GPU's multiprocessors is not modelled.

The CPU runs ahead of the GPU until a stream's launch queue is full, or until it reads a value (``loss.item()``, a NaN
check) or copies a batch: then it waits for the stream of that operation.  Streams do not wait for stream 0 implicitly,
because PyTorch's streams are created with ``cudaStreamNonBlocking`` (c10/cuda/CUDAStream.cpp).  ``cudaFree`` waits for
all streams.

The step ends when the CPU and every stream are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainatomy.operators.registry import find
from trainatomy.results.operations import Call, Operations
from trainatomy.timing.launch import CPUCosts, batch_bytes

LAUNCH_QUEUE_DEPTH = 1024
"""Kernels of a stream that can be launched and not yet started; a launch beyond that blocks the CPU.  Not documented;
the depth at which launches begin to block on GPUs since 2017 (CUDA 9 and later)."""

_BACKWARD_PHASES = frozenset({"backward", "recompute"})


@dataclass(slots=True)
class StepTimeline:
    """The outcome of replaying a step, in seconds.

    Attributes:
        seconds: From the end of the previous step to the end of this one.
        cpu_seconds: Time the CPU was busy, waits excluded.
        gpu_seconds: Time during which at least one stream was executing.
        phase_gpu_seconds: Sum of kernel durations by phase.
    """

    seconds: float
    cpu_seconds: float
    gpu_seconds: float
    phase_gpu_seconds: dict[str, float]


def blocks_cpu(call: Call) -> bool:
    """Return whether the CPU waits at this call until the GPU has caught up."""
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
    work = _work_of_loop(operations, order, loop_position, loop_seconds)
    rows = [
        _Row(seconds, *kernels[one.call], one.phase, one.stream, blocking[one.call], index in synchronized)
        for index, (one, seconds) in enumerate(zip(operations.operations, launch_seconds, strict=True))
    ]
    is_alone = len({one.stream for one in operations.operations}) == 1 and not operations.dependencies
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
    operations: Operations, order: Sequence[int], loop_position: int, loop_seconds: Mapping[str, float]
) -> dict[int, list[float]]:
    """Return the CPU time that the training loop adds before operations, by their places in ``order``."""
    work: dict[int, list[float]] = {}
    micro_step, before = -1, -1
    for place, index in enumerate(order):
        operation = operations.operations[index]
        if place == loop_position:
            work[place] = [loop_seconds["step"]]
        if operation.micro_step != micro_step or index <= before:  # a new micro-batch, or the same one repeated
            micro_step = operation.micro_step
            work.setdefault(place, []).append(loop_seconds["micro_step"])
        before = index
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
            timelines.run_on_cpu(row.launch)
            timelines.launch(index, row)
            if row.blocks:
                timelines.wait_for([timelines.streams[row.stream]])
                timelines.run_on_cpu(costs.read)
    return StepTimeline(timelines.end - began, timelines.cpu_busy, timelines.gpu_busy(), timelines.phase_gpu_seconds)


def _replay_one_stream(
    operations: Operations,
    order: Sequence[int],
    rows: Sequence[_Row],
    work: Mapping[int, Sequence[float]],
    costs: CPUCosts,
) -> StepTimeline:
    """Replay a step on one stream: as ``_replay_streams`` does, several times as fast."""
    cpu = end = 0.0
    queue: deque[tuple[float, int]] = deque()
    queued = 0
    for _ in range(2):
        began = max(cpu, end)
        cpu_busy = gpu_busy = 0.0
        phases = dict.fromkeys((rows[index].phase for index in order), 0.0)
        for place, index in enumerate(order):
            launch, seconds, kernels, phase, _, blocks, waits = rows[index]
            for extra in work.get(place, ()):
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
                ready = cpu + costs.launch_delay
                end = (ready if ready > end else end) + seconds
                gpu_busy += seconds
                phases[phase] += seconds
                queue.append((end, kernels))
                while queue and (queue[0][0] <= cpu or queued > LAUNCH_QUEUE_DEPTH):
                    done, count = queue.popleft()
                    cpu = max(cpu, done)
                    queued -= count
            if blocks:
                cpu = max(cpu, end) + costs.read
                cpu_busy += costs.read
                queue.clear()
                queued = 0
    return StepTimeline(max(cpu, end) - began, cpu_busy, gpu_busy, phases)


def _position_of_loop_work(operations: Operations, order: Sequence[int], blocking: Sequence[bool]) -> int:
    """Return where in ``order`` the loop does most of its own work of a step; 0 if there is no backward pass.

    That is after backward, once the Trainer has checked the loss for NaN, for which it waits: it then walks all
    parameters to clip their gradients, and the GPU is idle meanwhile.
    """
    after = 1 + max(
        (place for place, index in enumerate(order) if operations.operations[index].phase in _BACKWARD_PHASES),
        default=-1,
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
        busy: Sum of the durations since recording started.
        intervals: Begin and end of each operation since recording started; only kept if there are several streams.
    """

    end: float = 0.0
    queue: deque[tuple[float, int]] = field(default_factory=deque)
    queued: int = 0
    busy: float = 0.0
    intervals: list[tuple[float, float]] = field(default_factory=list)


class _Timelines:
    """The CPU's timeline and one for each stream, in seconds from the start of the replay."""

    def __init__(self, operations: Operations, launch_delay: float) -> None:
        self.cpu = self.cpu_busy = 0.0
        self.streams = {stream: _Stream() for stream in {operation.stream for operation in operations.operations}}
        self.phase_gpu_seconds: dict[str, float] = {}
        self._launch_delay = launch_delay
        self._dependencies = operations.dependencies
        self._awaited = {index for indices in operations.dependencies.values() for index in indices}
        self._ends: dict[int, float] = {}

    @property
    def end(self) -> float:
        """The time at which the CPU and all streams are done."""
        return max(self.cpu, *(stream.end for stream in self.streams.values())) if self.streams else self.cpu

    def start_recording(self) -> None:
        """Reset the busy times of the CPU and the streams."""
        self.cpu_busy = 0.0
        self.phase_gpu_seconds = {}
        for stream in self.streams.values():
            stream.busy = 0.0
            stream.intervals.clear()

    def run_on_cpu(self, seconds: float) -> None:
        """Let the CPU work."""
        self.cpu += seconds
        self.cpu_busy += seconds

    def launch(self, index: int, row: _Row) -> None:
        """Queue the kernels of an operation on its stream; the CPU waits while the queue is full."""
        stream = self.streams[row.stream]
        if row.kernels:
            stream.queued += row.kernels
            begin = max(stream.end, self.cpu + self._launch_delay)
            for dependency in self._dependencies.get(index, ()):
                begin = max(begin, self._ends.get(dependency, 0.0))
            stream.end = begin + row.seconds
            stream.busy += row.seconds
            stream.queue.append((stream.end, row.kernels))
            if len(self.streams) > 1:
                stream.intervals.append((begin, stream.end))
            while stream.queue and (stream.queue[0][0] <= self.cpu or stream.queued > LAUNCH_QUEUE_DEPTH):
                done, count = stream.queue.popleft()
                self.cpu = max(self.cpu, done)
                stream.queued -= count
        if index in self._awaited:
            self._ends[index] = stream.end
        spent = self.phase_gpu_seconds.get(row.phase, 0.0)
        self.phase_gpu_seconds[row.phase] = spent + (row.seconds if row.kernels else 0.0)

    def wait_for(self, streams: Iterable[_Stream]) -> None:
        """Let the CPU wait until these streams are done."""
        for stream in streams:
            self.cpu = max(self.cpu, stream.end)
            stream.queue.clear()
            stream.queued = 0

    def gpu_busy(self) -> float:
        """Return the time during which at least one stream was executing."""
        if len(self.streams) == 1:
            return next(iter(self.streams.values())).busy
        busy, until = 0.0, 0.0
        for begin, end in sorted(interval for stream in self.streams.values() for interval in stream.intervals):
            busy += max(end - max(begin, until), 0.0)
            until = max(until, end)
        return busy
