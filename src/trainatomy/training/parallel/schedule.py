"""The order of a pipeline's work in all its ranks, as PyTorch's schedules have it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainatomy.results.pipeline import Work

_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
"""Names of PyTorch's actions (``_ComputationType``) that take time; the others are communication."""


def order_of_work(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Work]]:
    """Return what each rank of a pipeline does in a step, in order.

    Schedules compute it for all ranks when they are made, from nothing but the numbers of stages and ranks.
    """
    kind: Any = get_schedule_class(schedule)
    stages = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, stage_index=ranks * local, submod=None
        )
        for local in range(stages_per_rank)
    ]
    made = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], n_microbatches=micro_batches)
    order = [list(_work(made.pipeline_order[rank])) for rank in range(ranks)]
    return order if issubclass(kind, PipelineScheduleMulti) else [_renumbered(works) for works in order]


def _renumbered(works: list[Work]) -> list[Work]:
    """Number the micro-batches of each kind of work in order, as schedules with one stage for each rank run them.

    PyTorch 2.13 runs 1F1B so, but describes its last rank with forward passes from 1 (``_get_pipeline_order``).
    """
    counts: dict[str, count[int]] = {}
    return [work._replace(micro_batch=next(counts.setdefault(work.kind, count()))) for work in works]


def _work(actions: Any) -> Iterator[Work]:
    for action in actions:
        if action is not None and action.computation_type.name in _KINDS:
            yield Work(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
