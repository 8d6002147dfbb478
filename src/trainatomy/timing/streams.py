"""Replay a step with any number of streams, and with waits between them.

Kernels beside a collective take longer (``contention.py``).  Where a collective begins while kernels run that were
launched before it, these end later than was known when they were launched; what the CPU or other streams have done by
then stays as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from trainatomy.results.operations import Operations
from trainatomy.timing.contention import Contention, Windows
from trainatomy.timing.host_costs import CPUCosts
from trainatomy.timing.one_stream import COLLECTIVES, LAUNCH_QUEUE_DEPTH, LoopWork, Row, StepTimeline, end_within

OnLaunch = Callable[[int, float, float, float, float], None]
"""Called with an operation's index, when its launch began and ended, when its kernels began, and how long they took."""


def replay_streams(
    operations: Operations,
    order: Sequence[int],
    rows: Sequence[Row],
    work: Mapping[int, Sequence[LoopWork]],
    costs: CPUCosts,
    on_launch: OnLaunch | None = None,
    contention: Contention | None = None,
) -> StepTimeline:
    """Replay a step with any number of streams.

    Args:
        operations: The operations of one rank's step.
        order: Indices into them, in the order of the step.
        rows: The costs of each.
        work: CPU time of the loop before operations, by their places in ``order``.
        costs: CPU costs.
        on_launch: Called for each operation of the step that counts, in its order; times in seconds from the begin of
            that step.
        contention: How collectives slow the kernels beside them; None: they do not.
    """
    timelines = _Timelines(operations, costs, dict.fromkeys((rows[index].phase for index in order), 0.0), contention)
    cpu_waits = operations.cpu_waits
    bounds = [run.begin for run in operations.stage_runs[:1]] + [run.end for run in operations.stage_runs]
    stretches = _stretches(order, rows, {*work, *bounds}, timelines.meets_others)
    launches: list[_Launch] = []
    for is_second in (False, True):
        began, passed = timelines.end, list[float]()
        timelines.start_recording()
        noted = launches if is_second and on_launch is not None else None
        for place, stretch in stretches:
            while len(passed) < len(bounds) and place >= bounds[len(passed)]:
                passed.append(max(timelines.computed - began, 0.0))
            for one in work.get(place, ()):
                timelines.run_on_cpu(one.after(timelines.warm_at - timelines.cpu_busy, costs.long_wait))
            index = stretch[0]
            if rows[index].waits:
                timelines.wait_for(timelines.streams.values())
            if index in cpu_waits:
                timelines.await_operations(cpu_waits[index])
            timelines.launch(stretch, rows, noted)
            if rows[index].blocks:
                timelines.read([timelines.streams[rows[index].stream]])
                timelines.run_on_cpu(costs.read)
    if on_launch is not None:
        for index, launched, launch_end, run in launches:
            taken = run.seconds + run.slowed
            on_launch(index, launched - began, launch_end - began, run.end - taken - began, taken)
    busy = timelines.gpu_busy()
    return StepTimeline(
        timelines.end - began,
        timelines.cpu_busy,
        busy,
        timelines.phase_gpu_seconds(),
        timelines.communication_seconds,
        max(busy - timelines.computing(), 0.0) if timelines.communication_seconds else 0.0,
        timelines.slowed_seconds(),
        tuple(passed),
    )


def _stretches(
    order: Sequence[int], rows: Sequence[Row], interrupted: Collection[int], meets_others: Collection[int]
) -> list[tuple[int, list[int]]]:
    """Divide a step into operations that follow each other on one stream with nothing between them.

    Args:
        order: Indices of operations, in the order of the step.
        rows: The costs of each.
        interrupted: Places in ``order`` before which something else happens.
        meets_others: Operations that wait for others or are waited for, and collectives; each is by itself.

    Returns:
        The place at which each stretch begins, and its operations.
    """
    found: list[tuple[int, list[int]]] = []
    stream: int | None = None
    for place, index in enumerate(order):
        row = rows[index]
        is_plain = not (row.waits or row.blocks or index in meets_others)
        if is_plain and row.stream == stream and place not in interrupted:
            found[-1][1].append(index)
        else:
            found.append((place, [index]))
            stream = row.stream if is_plain else None
    return found


@dataclass(slots=True)
class _Run:
    """The kernels of an operation on its stream.

    Attributes:
        call: Index of the operation's call.
        begin: When the first one starts.
        end: When the last one is done.
        seconds: How long they take alone.
        phase: Phase of the step.
        slowed: How much longer they take beside collectives.
    """

    call: int
    begin: float
    end: float
    seconds: float
    phase: str = ""
    slowed: float = 0.0

    def stretch(self, windows: Windows) -> None:
        """Let the kernels end when they do beside the collectives that are known; never earlier than before."""
        alone, end = self.begin + self.seconds, windows.end_of(self.call, self.begin, self.seconds)
        self.slowed = max(end - alone, 0.0)
        self.end = max(end, self.end)


_Launch = tuple[int, float, float, _Run]
"""Operation, when its launch began and ended, and its kernels."""


@dataclass(slots=True)
class _Stream:
    """The work queued on one CUDA stream.

    Attributes:
        end: When everything launched so far is done.
        queue: Each operation that has not started, as far as the CPU knows, and its number of kernels.
        queued: Number of kernels in ``queue``.
        beside: Kernels since the last collective of the stream; each ends no earlier than the one before.
    """

    end: float = 0.0
    queue: deque[tuple[_Run, int]] = field(default_factory=deque)
    queued: int = 0
    beside: list[_Run] = field(default_factory=list)


class _Timelines:
    """The CPU's timeline and one for each stream, in seconds from the start of the replay.

    Attributes:
        runs: The kernels of each operation on any stream since recording started.
        communication_seconds: Sum of the durations of collectives since then.
        warm_at: Value of ``cpu_busy`` at which the CPU's work has made up for its waits.
        meets_others: Operations that wait for others or are waited for, and collectives, by their indices.
    """

    def __init__(
        self,
        operations: Operations,
        costs: CPUCosts,
        phases: Mapping[str, float],
        contention: Contention | None = None,
    ) -> None:
        self.cpu = self.cpu_busy = self.warm_at = 0.0
        self.streams = {stream: _Stream() for stream in {operation.stream for operation in operations.operations}}
        self.communication_seconds = self._kernel_seconds = 0.0
        self.runs: list[_Run] = []
        self._no_seconds, self._phases = phases, dict(phases)
        self._is_collective = [call.name.startswith(COLLECTIVES) for call in operations.calls]
        self._operations = operations.operations
        self._windows = None if contention is None else Windows(contention)
        self._launch_delay, self._long_wait = costs.launch_delay, costs.long_wait
        self._dependencies = operations.dependencies
        waits = (*operations.dependencies.values(), *operations.cpu_waits.values())
        self._awaited = {index for indices in waits for index in indices}
        collectives = (index for index, one in enumerate(self._operations) if self._is_collective[one.call])
        self.meets_others = {*self._awaited, *self._dependencies, *operations.cpu_waits, *collectives}
        self._ends: dict[int, _Run] = {}

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
        self.warm_at -= self.cpu_busy
        self.cpu_busy = self.communication_seconds = self._kernel_seconds = 0.0
        self._phases = dict(self._no_seconds)
        self.runs = []

    def run_on_cpu(self, seconds: float) -> None:
        """Let the CPU work."""
        self.cpu += seconds
        self.cpu_busy += seconds

    def launch(self, indices: Sequence[int], rows: Sequence[Row], noted: list[_Launch] | None) -> None:
        """Queue the kernels of operations that follow each other on one stream: the hot loop.

        The CPU waits while the queue is full.  An operation in ``meets_others`` comes alone.
        """
        first = indices[0]
        stream = self.streams[rows[first].stream]
        for dependency in self._dependencies.get(first, ()):  # a view waits, too: what comes after it has to
            if dependency in self._ends:
                stream.end = max(stream.end, self._ends[dependency].end)
        queue, beside, windows, operations = stream.queue, stream.beside, self._windows, self._operations
        cpu, busy, end, queued = self.cpu, self.cpu_busy, stream.end, stream.queued
        until = 0.0 if windows is None else windows.until
        for index in indices:
            launch, seconds, kernels, phase, _, _, _, within, alternates = rows[index]
            launched, call = cpu, operations[index].call
            cpu += launch
            busy += launch
            launch_end = cpu
            if kernels:
                ready = cpu + self._launch_delay
                begin = max(end, ready - within)
                run = _Run(call, begin, begin + seconds, seconds, phase)
                self.runs.append(run)
                self._kernel_seconds += seconds
                self._phases[phase] += seconds
                if self._is_collective[call]:
                    self._communicate(stream, run)
                elif windows is not None:
                    if begin < until:
                        run.stretch(windows)
                    beside.append(run)
                if within:
                    run.end = end_within(begin, run.end - begin, ready, alternates)
                end = run.end
                if kernels > LAUNCH_QUEUE_DEPTH:
                    cpu = max(cpu, end - seconds * LAUNCH_QUEUE_DEPTH / kernels)
                    kernels = 1
                queue.append((run, kernels))
                queued += kernels
                while queue and (queue[0][0].end <= cpu or queued > LAUNCH_QUEUE_DEPTH):
                    done, count = queue.popleft()
                    cpu = max(cpu, done.end)
                    queued -= count
            else:
                run = _Run(call, end, end, 0.0)
            if noted is not None:
                noted.append((index, launched, launch_end, run))
        self.cpu, self.cpu_busy, stream.end, stream.queued = cpu, busy, end, queued
        if first in self._awaited:
            self._ends[first] = run

    def _communicate(self, stream: _Stream, run: _Run) -> None:
        """Let a collective slow the kernels beside it."""
        self.communication_seconds += run.seconds
        stream.beside.clear()
        if self._windows is not None and self._windows.add(run.call, run.begin, run.end):
            self._slow_those_launched(run.begin)

    def _slow_those_launched(self, begin: float) -> None:
        """Let kernels that were launched before a collective, and end after it begins, take longer."""
        assert self._windows is not None
        for stream in self.streams.values():
            running = [*takewhile(lambda run: run.end > begin, reversed(stream.beside))][::-1]
            for run, before in zip(running, (None, *running), strict=False):
                if before is not None:
                    run.begin = max(run.begin, before.end)
                run.stretch(self._windows)
            if running:
                stream.end = max(stream.end, running[-1].end)

    def await_operations(self, indices: Iterable[int]) -> None:
        """Let the CPU wait until these operations are done, by their indices."""
        for awaited in indices:
            if awaited in self._ends:
                self.cpu = max(self.cpu, self._ends[awaited].end)

    def read(self, streams: Iterable[_Stream]) -> None:
        """Let the CPU wait until these streams are done; its caches lose what the loop needs."""
        began = self.cpu
        self.wait_for(streams)
        if self.cpu > began:
            cold = max(self.warm_at, self.cpu_busy) + self.cpu - began
            self.warm_at = min(cold, self.cpu_busy + self._long_wait)

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
        return covered((run.begin, run.end) for run in self.runs)

    def computing(self) -> float:
        """Return the time during which at least one stream was executing something else than a collective."""
        return covered((run.begin, run.end) for run in self.runs if not self._is_collective[run.call])

    def slowed_seconds(self) -> float:
        """Return how much longer kernels took beside collectives."""
        return sum(run.slowed for run in self.runs)

    def phase_gpu_seconds(self) -> dict[str, float]:
        """Return the sum of the durations of kernels by phase."""
        found = dict(self._phases)
        for run in self.runs:
            if run.slowed:
                found[run.phase] += run.slowed
        return found


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that intervals cover together."""
    found, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        found += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return found
