"""Replay a step whose operations all run on one stream: as ``streams`` does, many times as fast.

Repetitions of a micro-batch are replayed only until they leave the same state behind.

An operation as the replays of a step see it, and the outcome of a replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.results.operations import Operations
from trainatomy.timing.host_costs import CPUCosts

if TYPE_CHECKING:
    from trainatomy.results.time import Power


LAUNCH_QUEUE_DEPTH = 1024
"""Kernels of a stream that can be launched and not yet started; a launch beyond that blocks the CPU.  Not documented;
the depth at which launches begin to block on GPUs since 2017 (CUDA 9 and later)."""

COLLECTIVES = ("nccl::", "peer::")
"""Namespaces of the operations that communicate with other GPUs."""

_TWO_DIRECTIONS = 4.0
"""Exponent by which the times of the CPU and the GPU for two directions add up: the root of the sum of their powers.

It was chosen on 21 trainings on an H200 and an H100 in which the GPU takes 0.8 to 2 times as long as the CPU for them:
their steps are off by -0.3 % in the mean and by 5.1 % (root mean square), and with the slower of both by -4.7 and
6.5 %.  Layers of one direction take as long as the slower of both (42 trainings: -0.2 % in the mean).
"""


class Row(NamedTuple):
    """An operation as a replay sees it.

    Attributes:
        launch: CPU seconds to launch it.
        seconds: Seconds on the GPU.
        kernels: Number of kernels.
        phase: Phase of the step.
        stream: Stream on which it runs.
        blocks: The CPU waits for it.
        waits: The CPU waits for all streams first.
        within: CPU seconds of ``launch`` that pass after the first kernel has been launched.
        alternates: Kernels are launched in turns for two streams, and overlap only where both are behind the CPU.
    """

    launch: float
    seconds: float
    kernels: int
    phase: str
    stream: int
    blocks: bool
    waits: bool
    within: float
    alternates: bool = False


row_of: Callable[[tuple[Any, ...]], Row] = partial(tuple.__new__, Row)
"""Makes a row of its fields in half the time that the class takes: a step has thousands, for each GPU and pace."""


def end_within(begin: float, seconds: float, ready: float, alternates: bool) -> float:
    """Return when kernels that begin while the CPU launches them are done.

    Args:
        begin: When the first of them begins.
        seconds: What they take if all are queued.
        ready: When the last of them can begin.
        alternates: See ``Row``: the nearer the CPU's time is to the GPU's, the more often a stream waits for it.
    """
    if not alternates or ready <= begin:
        return max(begin + seconds, ready)
    return float(begin + (seconds**_TWO_DIRECTIONS + (ready - begin) ** _TWO_DIRECTIONS) ** (1 / _TWO_DIRECTIONS))


class LoopWork(NamedTuple):
    """CPU time of the loop before an operation.

    Attributes:
        seconds: How long it takes where the CPU has been at work.
        after_wait: How much longer it takes after a long wait for the GPU.
    """

    seconds: float
    after_wait: float = 0.0

    def after(self, waited: float, long_wait: float) -> float:
        """Return how long it takes after a wait of at most ``long_wait``, less the CPU's work since then."""
        return self.seconds + self.after_wait * max(waited, 0.0) / long_wait


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
        slowed_seconds: Time that other kernels took longer because collectives ran beside them.
        stage_seconds: In a pipeline, when the first of ``Operations.stage_runs`` began and each of them was over.
        power: The GPU's mean power, where it is known.
    """

    seconds: float
    cpu_seconds: float
    gpu_seconds: float
    phase_gpu_seconds: dict[str, float]
    communication_seconds: float = 0.0
    exposed_seconds: float = 0.0
    slowed_seconds: float = 0.0
    stage_seconds: tuple[float, ...] = ()
    power: Power | None = None


SAME_STATE = 1e-10
"""Difference of what two repetitions of a micro-batch leave, as a share of its duration, up to which they are alike."""

FEWEST_REPEATED = 2
"""Repetitions that are left and worth not being replayed."""


def replay_one_stream(
    operations: Operations,
    order: Sequence[int],
    rows: Sequence[Row],
    work: Mapping[int, Sequence[LoopWork]],
    costs: CPUCosts,
) -> StepTimeline:
    """Replay a step on one stream: as ``replay_streams`` does, many times as fast."""
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

    rows: Sequence[Row]
    work: Mapping[int, Sequence[LoopWork]]
    alike: int


def _passes(operations: Operations, rows: Sequence[Row], work: Mapping[int, Sequence[LoopWork]]) -> list[_Pass]:
    """Return a step as passes, one for each repetition of a micro-batch."""
    places = sorted(work)
    found: list[tuple[Sequence[Row], dict[int, Sequence[LoopWork]]]] = []
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
        self._warm_at = 0.0  # value of ``cpu_busy`` at which the CPU's work has made up for its waits
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
        self._warm_at -= self.cpu_busy
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
        return [self.gpu - self.cpu, max(self._warm_at - self.cpu_busy, 0.0), *waiting]

    def _figures(self) -> list[float]:
        return [self.cpu, self.cpu_busy, self.gpu_busy, *self.phases.values()]

    def _repeat(self, before: Sequence[float], times: int) -> None:
        """Add to all figures ``times`` what was added to them since ``before``."""
        cpu, busy, *_ = now = self._figures()
        passed = times * (cpu - before[0])
        self._warm_at += times * (busy - before[1])
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
        delay, read, long_wait, warm_at = (
            self._costs.launch_delay,
            self._costs.read,
            self._costs.long_wait,
            self._warm_at,
        )
        for place, (launch, seconds, kernels, phase, _, blocks, waits, within, alternates) in enumerate(one.rows):
            if place in work:
                for one_work in work[place]:
                    extra = one_work.after(warm_at - cpu_busy, long_wait)
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
                if within:
                    end = end_within(max(ready - within, end), seconds, ready, alternates)
                else:
                    end = (ready if ready > end else end) + seconds
                gpu_busy += seconds
                phases[phase] += seconds
                if kernels > LAUNCH_QUEUE_DEPTH:
                    cpu = max(cpu, end - seconds * LAUNCH_QUEUE_DEPTH / kernels)
                    queued += 1 - kernels
                    kernels = 1
                queue.append((end, kernels))
                while queue and (queue[0][0] <= cpu or queued > LAUNCH_QUEUE_DEPTH):
                    done, count = queue.popleft()
                    cpu = done if done > cpu else cpu
                    queued -= count
            if blocks:
                if end > cpu:
                    warm_at = min(max(warm_at, cpu_busy) + end - cpu, cpu_busy + long_wait)
                    cpu = end
                cpu += read
                cpu_busy += read
                queue.clear()
                queued = 0
        self.cpu, self.gpu, self.cpu_busy, self.gpu_busy, self._queued = cpu, end, cpu_busy, gpu_busy, queued
        self._warm_at = warm_at
