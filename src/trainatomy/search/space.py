"""The space of a search: every combination of options, and the workload of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import FitRequest, check, check_precision, effective_batch_size, samples_per_rank
from trainatomy.results.fit import Change, Permission
from trainatomy.search.axes import AXES, applicable, axes_of, translated
from trainatomy.search.plans import Axis, Option
from trainatomy.workload.document import suggestion
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.search.estimates import Estimator

Point = tuple[str, ...]
"""Names of options, one for each axis of a space."""

_EXCLUSIVE = (
    frozenset({"optimizer", "optimizer_implementation"}),
    frozenset({"allocator", "torch_empty_cache_steps"}),
)
"""Axes of which a candidate changes one at most.  Another optimizer has no other implementation.  To unmap expandable
segments after every step and map them again took 25 to 60 % of the step on an H200 (lab/fit/records/h200.jsonl),
which the timing model does not know."""
_DEPENDENT = frozenset({"lora", "quantization"})
"""Axes of which the second needs the first: quantised weights cannot be trained, adapters can."""


@dataclass(frozen=True, slots=True)
class Space:
    """Combinations of the options of several axes.

    Attributes:
        workload: The workload that is varied.
        axes: Everything that could be varied, the batch size first.
        allowed: The permissions that the user gave; axes that need another one keep their given option.
        kept: Names of further axes that keep their given option.
    """

    workload: Workload
    axes: tuple[Axis, ...]
    allowed: tuple[Permission, ...] = ()
    kept: frozenset[str] = frozenset()

    def is_free(self, axis: Axis) -> bool:
        """Return whether the search may vary an axis."""
        return (not axis.permission or axis.permission in self.allowed) and axis.name not in self.kept

    def options(self, axis: Axis) -> tuple[str, ...]:
        """Return the names of the options that the search may choose."""
        if not self.is_free(axis):
            return (axis.given,)
        return tuple(option.name for option in axis.options)

    @property
    def size(self) -> int:
        """Number of combinations, without those that contradict each other."""
        paired = [axis for axis in self.axes if any(axis.name in pair for pair in (*_EXCLUSIVE, _DEPENDENT))]
        given = self.point()

        def is_valid(options: tuple[str, ...]) -> bool:
            point = given
            for axis, option in zip(paired, options, strict=True):
                point = self.replaced(point, axis.name, option)
            return self.is_valid(point)

        combinations = sum(map(is_valid, product(*map(self.options, paired))))
        return combinations * prod(len(self.options(axis)) for axis in self.axes if axis not in paired)

    def points(self, live: Mapping[str, Collection[str]]) -> Iterator[Point]:
        """Yield every combination of the options in ``live`` (names by axis) that is free of contradictions."""
        for point in product(*([o for o in self.options(a) if o in live[a.name]] for a in self.axes)):
            if self.is_valid(point):
                yield point

    def is_valid(self, point: Point) -> bool:
        """Return whether no two options of a point exclude each other, and none lacks another that it needs."""
        options = {axis.name: option for axis, option in zip(self.axes, point, strict=True)}
        changed = {axis.name for axis in self.axes if options[axis.name] != axis.given}
        if any(pair <= changed for pair in _EXCLUSIVE):
            return False
        return "quantization" not in changed or options.get("lora") != "none"

    def changed(self, point: Point, name: str, option: str) -> Point:
        """Return a point with another option of one axis, and what that needs of the others.

        Axes that exclude this one go back to their given option, and quantised weights come with adapters.
        """
        changed = self.replaced(point, name, option)
        for axis in self.axes:
            if axis.name != name and any({axis.name, name} == pair for pair in _EXCLUSIVE):
                changed = changed if self.is_valid(changed) else self.replaced(changed, axis.name, axis.given)
        lora = self.axis("lora")
        if self.is_valid(changed) or lora is None or not self.is_free(lora):
            return changed
        return self.replaced(changed, "lora", lora.leanest)

    def leanest(self, since: Point | None = None) -> Point:
        """Return the candidate that should need the least memory: the smallest batch, with all that saves memory.

        ``since``: a candidate whose options the axes keep that the search may not vary, by default the given one.
        """
        point = (str(self.batches[0]), *(since or self.point())[1:])
        for axis in sorted(self.axes[1:], key=lambda axis: not axis.permission):  # what saves most comes first
            changed = self.replaced(point, axis.name, axis.leanest)
            if axis.leanest and self.is_free(axis) and self.is_valid(changed):
                point = changed
        return point

    def axis(self, name: str) -> Axis | None:
        """Return the axis of that name, if the workload has it."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def point(self, **options: str) -> Point:
        """Return the point with the given option of every axis, except for ``options``."""
        return tuple(options.get(axis.name, axis.given) for axis in self.axes)

    def replaced(self, point: Point, name: str, option: str) -> Point:
        """Return a point with another option of one axis."""
        return tuple(option if axis.name == name else own for axis, own in zip(self.axes, point, strict=True))

    def batch(self, point: Point) -> int:
        """Return the samples per batch of a point."""
        return int(point[0])

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that the search may choose."""
        return tuple(int(option) for option in self.options(self.axes[0]))

    def settings(self, point: Point) -> dict[str, object]:
        """Return the keys that a point sets, with their values."""
        return {
            key: value
            for axis, name in zip(self.axes, point, strict=True)
            for key, value in axis.option(name).settings.items()
        }

    def workload_at(self, point: Point) -> Workload:
        """Return the workload of a point.

        Raises:
            WorkloadError: Its settings contradict each other or something that the workload says.
        """
        return self.workload.replace(self.settings(point))

    def changes(self, point: Point, since: Point | None = None) -> tuple[Change, ...]:
        """Return what a point changes, relative to another one or to the workload as it was given."""
        before = since or self.point()
        return tuple(
            axis.change(new)
            for axis, old, new in zip(self.axes, before, point, strict=True)
            if old != new or (since is None and axis.name == "batch" and self._rebatches(axis, new))
        )

    def _rebatches(self, axis: Axis, name: str) -> bool:
        """Return whether a batch of the given size comes with another number of accumulation steps."""
        steps = axis.option(name).settings.get("train.gradient_accumulation_steps")
        return steps is not None and steps != self.workload.train.gradient_accumulation_steps


def space_of(
    workload: Workload, request: FitRequest, prior: Estimator | None = None, *, as_given: bool = False
) -> Space:
    """Return the space of a search.

    Args:
        workload: The training.
        request: How to search.
        prior: Outcomes whose axes the space is to have, in the same order.
        as_given: Whether the workload is to be varied whatever its precision costs on its GPU.

    Raises:
        WorkloadError: The workload, the GPU and the request contradict each other.
    """
    check(workload, request)
    if not as_given:
        check_precision(workload, request)
    effective = effective_batch_size(workload, request)
    axes = axes_of(workload, samples_per_rank(workload, request))
    if request.can_apply is not None:
        axes = applicable(axes, request.can_apply)
    if request.translated is not None:
        axes = translated(axes, request.translated)
    if prior is not None and [axis.name for axis in prior.space.axes] == [*(axis.name for axis in axes), "plan"]:
        axes = (*axes, Axis("plan", (Option("none"),), "none"))
    for name in request.keep:
        if name not in AXES:
            hint = suggestion(name, AXES) or f"; known: {', '.join(AXES)}"
            raise WorkloadError(f"keep: unknown value {name!r}{hint}")
    if "batch" in request.keep and axes[0].given not in {option.name for option in axes[0].options}:
        raise WorkloadError(
            f"an effective batch size of {effective} is no multiple of the batch size {axes[0].given}, which was to be "
            "kept; give a multiple, or let the batch size vary",
            key="train.per_device_train_batch_size",
        )
    return _without_impossible_batches(Space(workload, axes, request.allow, frozenset(request.keep)))


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


def given_point(space: Space) -> Point | None:
    """Return the workload as it was given, if its batch size divides the effective batch size."""
    point = space.point()
    return point if point[0] in {option.name for option in space.axes[0].options} else None
