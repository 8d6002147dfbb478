"""The time of a step in a pipeline: the schedule's order of work, with the durations of each stage.

Each stage's work is timed as if what it receives were there at once (``stage_seconds``).  ``schedule`` then follows
PyTorch's order in every rank: work begins when the rank is free and what it needs has arrived from another rank.  A
message takes the link's time and does not keep its sender busy; while a rank waits, its CPU launches nothing ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainatomy.results.time import Work
from trainatomy.timing.step import RankStep, replayed

MESSAGES = frozenset({"nccl::send", "nccl::recv"})
_STEPS = 3
"""Steps that are followed; the time between the ends of the last two is that of a step in the middle of a training."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Times of a rank's actions in a step, in seconds.

    Attributes:
        before: Until its first forward pass: moving the batch.
        work: Each part of a micro-batch, by (kind, place of the stage in the rank, micro-batch).
        after: After its last backward pass: reducing and clipping gradients, the optimizer.
    """

    before: float
    work: Mapping[tuple[str, int, int], float]
    after: float

    @property
    def total(self) -> float:
        """Seconds in which the rank works."""
        return self.before + sum(self.work.values()) + self.after


@dataclass(frozen=True, slots=True)
class PipelineSeconds:
    """A step of a whole pipeline: its duration, and the share of the ranks' time in which they wait for each other."""

    step: float
    bubble_share: float


def stage_seconds(step: RankStep, ranks: int, pace: float = 1.0) -> StageSeconds:
    """Return the durations of the work of one of ``ranks`` ranks of a pipeline; ``pace`` as in ``replayed``."""
    timeline = replayed(step, at_once=MESSAGES, pace=pace)
    begin, *ends = timeline.stage_seconds
    work = {
        (run.work.kind, run.work.stage // ranks, run.work.micro_batch): end - start
        for run, start, end in zip(step.operations.stage_runs, timeline.stage_seconds, ends, strict=False)
    }
    return StageSeconds(begin, work, timeline.seconds - timeline.stage_seconds[-1])


def schedule(
    order: Sequence[Sequence[Work]],
    seconds: Sequence[StageSeconds],
    message_seconds: Callable[[int, int], float],
    *,
    together: bool,
) -> PipelineSeconds:
    """Return the time of a step.

    Args:
        order: What each rank does.
        seconds: The durations of each rank.
        message_seconds: The time of a message from one rank to another.
        together: Whether ranks meet after their last backward pass, to clip gradients by a common norm.
    """
    free, ends = [0.0] * len(order), []
    for _ in range(_STEPS):
        done = _follow(order, seconds, message_seconds, free)
        done = [max(done)] * len(done) if together else done
        free = [end + rank.after for end, rank in zip(done, seconds, strict=True)]
        ends.append(max(free))
    step = ends[-1] - ends[-2]
    busy = sum(rank.total for rank in seconds)
    return PipelineSeconds(step, max(1 - busy / (step * len(order)), 0.0))


def _follow(
    order: Sequence[Sequence[Work]],
    seconds: Sequence[StageSeconds],
    message_seconds: Callable[[int, int], float],
    free: Sequence[float],
) -> list[float]:
    """Return when each rank is done with its last micro-batch, from when it was free to begin the step."""
    ranks = len(order)
    rank_of = {work.stage: rank for rank, works in enumerate(order) for work in works}
    now = [begin + rank.before for begin, rank in zip(free, seconds, strict=True)]
    last, place, finished = max(rank_of), [0] * ranks, dict[tuple[str, int, int], float]()
    while any(place[rank] < len(order[rank]) for rank in range(ranks)):
        moved = False
        for rank in range(ranks):
            while place[rank] < len(order[rank]):
                work = order[rank][place[rank]]
                needed = _needed(work, last)
                if needed is not None and needed not in finished:
                    break
                arrives = 0.0
                if needed is not None:
                    sender = rank_of[needed[1]]
                    arrives = finished[needed] + (message_seconds(sender, rank) if sender != rank else 0.0)
                now[rank] = (
                    max(now[rank], arrives) + seconds[rank].work[work.kind, work.stage // ranks, work.micro_batch]
                )
                finished[_result(work)] = now[rank]
                place[rank] += 1
                moved = True
        if not moved:
            raise ValueError(f"the schedule cannot go on: ranks are at {place}")
    return now


def _result(work: Work) -> tuple[str, int, int]:
    """Return the name of what other stages wait for: backward passes send gradients, also where they are divided."""
    kind = "backward" if work.kind == "backward_input" else work.kind
    return kind, work.stage, work.micro_batch


def _needed(work: Work, last: int) -> tuple[str, int, int] | None:
    """Return what a part of a micro-batch receives from the stage before or after it; None if nothing."""
    if work.kind == "forward":
        return ("forward", work.stage - 1, work.micro_batch) if work.stage else None
    if work.kind == "backward_weight":
        return None
    return ("backward", work.stage + 1, work.micro_batch) if work.stage < last else None
