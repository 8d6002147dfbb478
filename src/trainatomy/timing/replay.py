"""An operation as the replays of a step see it, and the outcome of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
