"""Replay a step with any number of streams, and with waits between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainatomy.results.operations import Operations
from trainatomy.timing.launch import CPUCosts
from trainatomy.timing.replay import COLLECTIVES, LAUNCH_QUEUE_DEPTH, Row, StepTimeline


def replay_streams(
    operations: Operations,
    order: Sequence[int],
    rows: Sequence[Row],
    work: Mapping[int, Sequence[float]],
    costs: CPUCosts,
    on_launch: Callable[[int, float, float, float], None] | None = None,
) -> StepTimeline:
    """Replay a step with any number of streams.

    Args:
        operations: The operations of one rank's step.
        order: Indices into them, in the order of the step.
        rows: The costs of each.
        work: CPU time of the loop before operations, by their places in ``order``.
        costs: CPU costs.
        on_launch: Called in the step that counts with each operation's index, and when its launch began and ended and
            its kernels began, in seconds from the begin of that step.
    """
    timelines = _Timelines(operations, costs.launch_delay)
    bounds = [run.begin for run in operations.stage_runs[:1]] + [run.end for run in operations.stage_runs]
    for is_second in (False, True):
        began, passed = timelines.end, list[float]()
        timelines.start_recording()
        for place, index in enumerate(order):
            while len(passed) < len(bounds) and place >= bounds[len(passed)]:
                passed.append(max(timelines.computed - began, 0.0))
            row = rows[index]
            for seconds in work.get(place, ()):
                timelines.run_on_cpu(seconds)
            if row.waits:
                timelines.wait_for(timelines.streams.values())
            timelines.await_operations(index)
            launched = timelines.cpu
            timelines.run_on_cpu(row.launch)
            launch_end = timelines.cpu
            timelines.launch(index, row)
            if is_second and on_launch is not None:
                begin = timelines.streams[row.stream].end - (row.seconds if row.kernels else 0.0)
                on_launch(index, launched - began, launch_end - began, begin - began)
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
        tuple(passed),
    )


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

    @property
    def computed(self) -> float:
        """The time at which all streams of the model's operations are done, those of collectives left out."""
        return max((stream.end for number, stream in self.streams.items() if number >= 0), default=0.0)

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

    def launch(self, index: int, row: Row) -> None:
        """Queue the kernels of an operation on its stream; the CPU waits while the queue is full."""
        stream = self.streams[row.stream]
        for dependency in self._dependencies.get(index, ()):  # a view waits, too: what comes after it has to
            stream.end = max(stream.end, self._ends.get(dependency, 0.0))
        if row.kernels:
            stream.queued += row.kernels
            ready = self.cpu + self._launch_delay
            begin = max(stream.end, ready - row.within)
            stream.end = max(begin + row.seconds, ready) if row.within else begin + row.seconds
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
