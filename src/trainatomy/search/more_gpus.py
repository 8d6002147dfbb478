"""Several GPUs as a way to make a training fit: FSDP2 over 2, 4 and 8 of them, at the same effective batch size.

With DeepSpeed they share what its configuration says.  Gradient checkpointing is switched on where the activations
alone would not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainatomy.errors import WorkloadError
from trainatomy.results.fit import Change, Remedy
from trainatomy.search.axes import batch_axis, checkpointing_axis, divisors
from trainatomy.search.explore import Exploration
from trainatomy.search.fitting import candidate_of
from trainatomy.search.footprint import ACTIVATIONS
from trainatomy.search.options import SearchOptions, space_of
from trainatomy.search.outcomes import Outcome
from trainatomy.search.plans import fully_sharded
from trainatomy.workload.global_batch import effective_batch_size_of
from trainatomy.workload.schema import Workload

COUNTS = (2, 4, 8)
"""Numbers of GPUs that are tried: those of one machine."""
_AXES = ("plan", "gpus")
_SHARDED = frozenset({"weights", "optimizer_states", "gradients"})


def more_gpus(exploration: Exploration, options: SearchOptions, given: Outcome) -> Iterator[Remedy]:
    """Yield a training that does not fit, spread over more GPUs, each executed.

    The batch size of each GPU stays, or becomes the largest smaller one that divides the samples of a step.  Fewer
    samples than GPUs become one for each, and the effective batch size grows.

    Args:
        exploration: The search that executed the training.
        options: How to search.
        given: The training.
    """
    workload = exploration.space.workload_at(given.point)
    parallel, samples = workload.parallel, effective_batch_size_of(workload)
    if parallel.nodes > 1 or parallel.tp_size > 1 or set(options.keep) & set(_AXES):
        return
    counts = [count for count in COUNTS if count > parallel.gpus]
    counts = [count for count in counts if samples % count == 0] or counts
    for count in counts:
        for checkpointed in (False, True):
            if _held(given, count, checkpointed=checkpointed) > exploration.usable_bytes:
                continue
            changes = _changes(workload, count, checkpointed=checkpointed)
            settings = {key: value for change in changes for key, value in change.settings.items()}
            if options.can_apply is None or options.can_apply(settings):
                yield from _executed(exploration, options, given, workload, changes)
            break


def _held(given: Outcome, count: int, *, checkpointed: bool) -> float:
    """Return about how much each of several GPUs holds at least: its share of the states, and its own activations."""

    def share(part: str, size: float) -> float:
        if part in ACTIVATIONS:
            return 0.0 if checkpointed else size
        return size / count if part in _SHARDED else size

    return max(sum(share(part, size) for part, size in moment.parts.items()) for moment in given.footprint.moments)


def _changes(workload: Workload, count: int, *, checkpointed: bool) -> tuple[Change, ...]:
    """Return the changes to this many GPUs; if they do not divide the samples of a step, each gets one sample."""
    samples, size = effective_batch_size_of(workload), workload.train.per_device_train_batch_size
    share = samples // count if samples % count == 0 else 1
    largest = max(each for each in divisors(share) if each <= size)
    changes = [Change("gpus", str(count), {"parallel.gpus": count})]
    if workload.train.deepspeed is None:
        changes.append(Change("plan", "fsdp2", fully_sharded(workload)))
    changes.append(batch_axis(workload, divisors(share), share).change(str(largest)))
    if samples % count:
        changes.append(Change("effective_batch_size", str(count), {}))
    if checkpointed and not workload.train.gradient_checkpointing:
        changes.append(checkpointing_axis(workload).change("on"))
    return tuple(changes)


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
