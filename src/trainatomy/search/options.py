"""The request of a search: its options, the checks of them, and the space that they and the workload span."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainatomy.errors import WorkloadError
from trainatomy.results.fit import Permission
from trainatomy.search.axes import AXES, PERMISSIONS, CanApply, applicable, axes_of
from trainatomy.search.estimates import Estimator
from trainatomy.search.plans import Axis, Option
from trainatomy.search.space import Point, Space
from trainatomy.workload.document import suggestion
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import effective_batch_size_of

DEFAULT_HEADROOM = 0.05


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        effective_batch_size: Samples per optimizer step; ``None`` for that of the workload.
        headroom: Share of the GPU's memory that must stay free.
        allow: Changes of what is trained that the search may make.
        keep: Axes that it may not vary.
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
        prices: Execute the workload as it was given too, and the single changes of the best candidate.
        can_apply: Says which settings can be applied to what is trained; the others are neither tried nor priced.
            All can by default.
    """

    effective_batch_size: int | None = None
    headroom: float = DEFAULT_HEADROOM
    allow: tuple[Permission, ...] = ()
    keep: tuple[str, ...] = ()
    exhaustive: bool = False
    prices: bool = True
    can_apply: CanApply | None = None


def space_of(
    workload: Workload, options: SearchOptions, prior: Estimator | None = None, *, as_given: bool = False
) -> Space:
    """Return the space of a search.

    Args:
        workload: The training.
        options: How to search.
        prior: Outcomes whose axes the space is to have, in the same order.
        as_given: Whether the workload is to be varied whatever its precision costs on its GPU.

    Raises:
        WorkloadError: The workload, the GPU and the options contradict each other.
    """
    check(workload, options)
    if not as_given:
        check_precision(workload, options)
    effective = effective_batch_size(workload, options)
    axes = axes_of(workload, samples_per_rank(workload, options))
    if options.can_apply is not None:
        axes = applicable(axes, options.can_apply)
    if prior is not None and [axis.name for axis in prior.space.axes] == [*(axis.name for axis in axes), "plan"]:
        axes = (*axes, Axis("plan", (Option("none"),), "none"))
    for name in options.keep:
        if name not in AXES:
            hint = suggestion(name, AXES) or f"; known: {', '.join(AXES)}"
            raise WorkloadError(f"keep: unknown value {name!r}{hint}")
    if "batch" in options.keep and axes[0].given not in {option.name for option in axes[0].options}:
        raise WorkloadError(
            f"an effective batch size of {effective} is no multiple of the batch size {axes[0].given}, which was to be "
            "kept; give a multiple, or let the batch size vary",
            key="train.per_device_train_batch_size",
        )
    return _without_impossible_batches(Space(workload, axes, options.allow, frozenset(options.keep)))


def _without_impossible_batches(space: Space) -> Space:
    """Leave out batch sizes that the schema refuses because they fit on no GPU."""

    def is_possible(name: str) -> bool:
        try:
            space.workload_at((name, *space.point()[1:]))
        except WorkloadError:
            return False
        return True

    batch = space.axes[0]
    possible = tuple(option for option in batch.options if is_possible(option.name))
    if not possible:  # then something else is wrong, and its message says what
        space.workload_at((batch.options[0].name, *space.point()[1:]))
    return replace(space, axes=(replace(batch, options=possible), *space.axes[1:]))


def refusal(workload: Workload) -> WorkloadError | None:
    """Return why no search can vary a workload, ``None`` if one can."""
    if workload.mode != "training":
        return WorkloadError(f"mode: {workload.mode}: fit searches the settings of a training", key="mode")
    if workload.parallel.pp_size > 1:
        message = "parallel.pp_size: fit does not search pipelines; predict them, or use trainatomy compare --sweep"
        return WorkloadError(message, key="parallel.pp_size")
    return None


def check(workload: Workload, options: SearchOptions) -> None:
    """Raise ``WorkloadError`` for requests that contradict each other or the GPU."""
    if (refused := refusal(workload)) is not None:
        raise refused
    if not 0 <= options.headroom < 1:
        raise WorkloadError(f"headroom: {options.headroom:g} is not a share of the GPU's memory; give 0 to 0.99")
    for name in options.allow:
        if name not in PERMISSIONS:
            raise WorkloadError(f"allow: unknown value {name!r}{suggestion(name, PERMISSIONS)}")
    size = options.effective_batch_size
    if size is not None and size < 1:
        raise WorkloadError(f"effective_batch_size: {size} is not a number of samples; give 1 or more")


def unsupported_precision(workload: Workload) -> str | None:
    """Return the kind of mixed precision that a workload asks for and its GPU has no arithmetic units for."""
    gpu, train = workload.resolve_gpu(), workload.train
    return next((kind for kind in ("bf16", "fp16", "tf32") if getattr(train, kind) and kind not in gpu.rates), None)


def check_precision(workload: Workload, options: SearchOptions) -> None:
    """Raise ``WorkloadError`` for a precision that the GPU has no arithmetic units for, unless it may be changed."""
    kind, gpu = unsupported_precision(workload), workload.resolve_gpu()
    if kind is None or "precision" in options.allow:
        return
    raise WorkloadError(
        f"{workload.where('train', kind)}: the {gpu.name} (compute capability {'.'.join(map(str, gpu.capability))}) "
        f"has no arithmetic units for {kind}; choose another precision, or let the search choose: --allow precision",
        key=f"train.{kind}",
    )


def effective_batch_size(workload: Workload, options: SearchOptions) -> int:
    """Return the samples per optimizer step on all GPUs: as asked for, or those of the workload."""
    return options.effective_batch_size or effective_batch_size_of(workload)


def samples_per_rank(workload: Workload, options: SearchOptions) -> int:
    """Return the samples per optimizer step on each data-parallel rank.

    Raises:
        WorkloadError: The ranks do not divide the effective batch size.
    """
    samples, ranks = effective_batch_size(workload, options), workload.parallel.data_parallel_size
    if samples % ranks:
        raise WorkloadError(
            f"an effective batch size of {samples} cannot be divided among {ranks} data-parallel ranks; "
            f"give a multiple of {ranks}, or other GPUs",
            key="parallel.gpus",
        )
    return samples // ranks


def usable_bytes(workload: Workload, headroom: float) -> int:
    """Return the device memory that a candidate may take."""
    return int(workload.resolve_gpu().memory_bytes * (1 - headroom))


def given_point(space: Space) -> Point | None:
    """Return the workload as it was given, if its batch size divides the effective batch size."""
    point = space.point()
    return point if point[0] in {option.name for option in space.axes[0].options} else None
