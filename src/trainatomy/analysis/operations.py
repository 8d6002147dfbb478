"""From a step's operations to its anatomy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainatomy.analysis.claims import claims
from trainatomy.analysis.operation_table import Step, Timed
from trainatomy.analysis.padding import paddings
from trainatomy.analysis.shapes import wasteful_shapes, with_gains
from trainatomy.catalog.gpus import GPU
from trainatomy.results.operation_breakdown import Joined, OperationBreakdown, PublishedShares
from trainatomy.results.operations import Call, Operations


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """What a clock says of a step: ``times``, one for each operation in order, and the ``price`` of any call (GPU
    seconds)."""

    times: Sequence[Timed | None]
    price: Callable[[Call], float]


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profiler measured: GPU ``seconds``, one for each operation in order (``None``: it did not find it), and
    how it was joined."""

    seconds: Sequence[float | None]
    joined: Joined


@dataclass(frozen=True, slots=True)
class Scope:
    """Which operations are looked at: phases, modules whose path begins so; all of them where nothing is said."""

    phases: tuple[str, ...] = ()
    module: str = ""

    def keeps(self, operations: Operations) -> list[bool]:
        """Whether each operation is in it."""
        return [
            (not self.phases or operation.phase in self.phases) and operation.module.startswith(self.module)
            for operation in operations.operations
        ]


def anatomise(
    name: str,
    workload: Mapping[str, object],
    gpu: GPU,
    operations: Operations,
    *,
    peak: dict[str, int] | None = None,
    clock: OperationTimes | None = None,
    profile: Profile | None = None,
    scope: Scope | None = None,
    tf32: bool = False,
    top: int = 15,
    published: PublishedShares | None = None,
    notes: tuple[str, ...] = (),
) -> OperationBreakdown:
    """The anatomy of ``operations`` on ``card``; ``peak``: bytes by group at the peak; ``top``: how many of the
    heaviest operations are kept."""
    times = clock.times if clock is not None else None
    measured = profile.seconds if profile is not None else None
    step = Step(operations, times, measured, (scope or Scope()).keeps(operations))
    whole = step.total()
    shapes = wasteful_shapes(step, gpu.capability, gpu.multiprocessors, tf32)
    return OperationBreakdown(
        name=name,
        workload=dict(workload),
        card=gpu.id,
        operations=whole.calls,
        flop=whole.flop,
        bytes=whole.bytes,
        groups=step.groups(peak),
        heaviest=step.heaviest(top),
        unformulated=step.unformulated(),
        by_rule=step.by_rule(),
        aside=step.aside(),
        claims=claims(step),
        shapes=with_gains(shapes, step, clock.price) if clock is not None else shapes,
        paddings=paddings(shapes, step, workload, clock.price if clock is not None else None),
        modules=step.modules(top),
        seconds=whole.seconds if times is not None else None,
        measured_seconds=whole.measured if measured is not None else None,
        joined=profile.joined if profile is not None else None,
        published=published,
        notes=notes,
    )
