"""Several GPUs as a way to make a training fit: FSDP2 over 2, 4 and 8 of them, at the same effective batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainatomy.errors import WorkloadError
from trainatomy.results.fit import Change, Remedy
from trainatomy.search.axes import batch_axis, divisors
from trainatomy.search.estimates import Outcome
from trainatomy.search.explore import Exploration
from trainatomy.search.fitting import candidate_of
from trainatomy.search.options import SearchOptions, space_of
from trainatomy.search.plans import fully_sharded
from trainatomy.workload.global_batch import effective_batch_size_of
from trainatomy.workload.schema import Workload

COUNTS = (2, 4, 8)
"""Numbers of GPUs that are tried: those of one machine."""
_AXES = ("plan", "gpus")


def more_gpus(exploration: Exploration, options: SearchOptions, given: Outcome) -> Iterator[Remedy]:
    """Yield a training that does not fit, spread over more GPUs by FSDP2, each executed.

    The batch size of each GPU stays, or becomes the largest smaller one that divides the samples of a step.

    Args:
        exploration: The search that executed the training.
        options: How to search.
        given: The training.
    """
    workload = exploration.space.workload_at(given.point)
    parallel = workload.parallel
    if parallel.nodes > 1 or parallel.tp_size > 1 or set(options.keep) & set(_AXES):
        return
    for count in COUNTS:
        changes = _changes(workload, count) if count > parallel.gpus else ()
        settings = {key: value for change in changes for key, value in change.settings.items()}
        if changes and (options.can_apply is None or options.can_apply(settings)):
            yield from _executed(exploration, options, given, workload, changes)


def _changes(workload: Workload, count: int) -> tuple[Change, ...]:
    """Return the changes to this many GPUs; none if they do not divide the samples of a step."""
    samples, size = effective_batch_size_of(workload), workload.train.per_device_train_batch_size
    if samples % count:
        return ()
    share = samples // count
    batch = batch_axis(workload, divisors(share), share)
    largest = max(each for each in divisors(share) if each <= size)
    return (
        Change("gpus", str(count), {"parallel.gpus": count}),
        Change("plan", "fsdp2", fully_sharded(workload)),
        batch.change(str(largest)),
    )


def _executed(
    exploration: Exploration,
    options: SearchOptions,
    given: Outcome,
    workload: Workload,
    changes: tuple[Change, ...],
) -> Iterator[Remedy]:
    """Execute a training on more GPUs, and yield it if it can be predicted."""
    settings = {key: value for change in changes for key, value in change.settings.items()}
    try:
        spread = workload.replace(settings)
        space = space_of(spread, replace(options, effective_batch_size=None))
    except WorkloadError:
        return
    found = Exploration(space, exploration.usable_bytes, exploration.executor, exploration.observer)
    found.execute([space.point()])
    for outcome in found.outcomes.values():
        yield Remedy(
            kind="more GPUs",
            changes=changes,
            candidate=replace(candidate_of(found, outcome), changes=changes),
            device_bytes=outcome.device_bytes - given.device_bytes,
            step_seconds=outcome.seconds / given.seconds - 1,
        )
