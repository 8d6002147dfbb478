"""Analyze the operations of a step: groups, the heaviest operations and modules, and shapes that waste the GPU.

Check general statements of training guides against the operations of this step.

Sources: Hugging Face, "Model training anatomy" and "Methods and tools for efficient training": backward takes about
twice the FLOP of forward; element-wise functions are bound by memory (forward reads one tensor and writes one, backward
reads two and writes one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainatomy.analysis.operation_table import OperationTable, PredictedTime
from trainatomy.analysis.shapes import paddings, wasteful_shapes, with_gains
from trainatomy.catalog.gpus import GPU
from trainatomy.operators.operator import GROUPS
from trainatomy.operators.registry import group_of
from trainatomy.results.operations import Call, Claim, Joined, OperationBreakdown, Operations, PublishedShares
from trainatomy.results.tasks import Experts
from trainatomy.results.trace import WORKSPACES, AllocationTrace


def claims(table: OperationTable) -> tuple[Claim, ...]:
    """Return the claims this step can be checked against: it needs a backward pass and an activation function."""
    return tuple(claim for claim in (_backward_flop(table), _activation_bytes(table)) if claim is not None)


def _backward_flop(table: OperationTable) -> Claim | None:
    flop: Counter[str] = Counter()
    for _, operation, work in table.kernels():
        flop[operation.phase] += (work.flop or 0) * operation.repeats
    forward, backward, recompute = (float(flop[phase]) for phase in ("forward", "backward", "recompute"))
    if not forward or not backward:
        return None
    return Claim("backward_to_forward_flop", forward, backward, backward / forward, recompute=recompute or None)


def _activation_bytes(table: OperationTable) -> Claim | None:
    """Compare the traffic of activation functions that run in both directions."""
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    names: set[str] = set()
    for _, operation, work in table.kernels():
        if work.operator is not None and work.operator.activation and operation.phase in ("forward", "backward"):
            direction = work.operator.activation
            read[direction] += work.read * operation.repeats
            written[direction] += work.written * operation.repeats
            names.add(table.operations.calls[operation.call].name.rpartition("::")[2].removesuffix("_"))
    if not written["forward"] or not written["backward"]:
        return None
    forward, backward = (read[way] + written[way] for way in ("forward", "backward"))
    return Claim(
        "activation_bytes",
        float(forward),
        float(backward),
        backward / forward,
        operators=tuple(sorted(names)),
        forward_reads_per_write=read["forward"] / written["forward"],
        backward_reads_per_write=read["backward"] / written["backward"],
    )


_NOT_RESULTS = WORKSPACES | {"weight", "buffer", "optimizer_state", "input"}
"""Labels of allocations that no operation of the step computes."""


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """The timing model's answers for a step.

    Attributes:
        times: The time of each operation, in order.
        gpu_seconds: Function that predicts the GPU seconds of any call.
    """

    times: Sequence[PredictedTime | None]
    gpu_seconds: Callable[[Call], float]


@dataclass(frozen=True, slots=True)
class Profile:
    """A profiler's measurements of a step.

    Attributes:
        seconds: GPU seconds of each operation, in order (``None``: not found in the profile).
        joined: How the profile was matched with the operations.
    """

    seconds: Sequence[float | None]
    joined: Joined


@dataclass(frozen=True, slots=True)
class Scope:
    """The operations to look at: those of some phases and of modules whose path starts with ``module``."""

    phases: tuple[str, ...] = ()
    module: str = ""

    def selects(self, operations: Operations) -> list[bool]:
        """Return whether each operation is in the scope; without ``phases``, all phases are."""
        return [
            (not self.phases or operation.phase in self.phases) and operation.module.startswith(self.module)
            for operation in operations.operations
        ]


@dataclass(frozen=True, slots=True)
class Analyzed:
    """The training whose step is broken down.

    Attributes:
        name: Name of the workload.
        workload: Its description.
        gpu: The GPU it runs on.
        tf32: Whether fp32 matrix products may use tensor cores.
        scope: The operations to look at; all of them by default.
        published: Published shares to show beside these.
        notes: Notes to attach.
        experts: The experts of a mixture of experts.
    """

    name: str
    workload: Mapping[str, object]
    gpu: GPU
    tf32: bool = False
    scope: Scope = Scope()
    published: PublishedShares | None = None
    notes: tuple[str, ...] = ()
    experts: Experts | None = None


def analyze_operations(
    training: Analyzed,
    operations: Operations,
    *,
    peak: dict[str, int] | None = None,
    predicted: PredictedTimes | None = None,
    profile: Profile | None = None,
    top: int = 15,
) -> OperationBreakdown:
    """Break a step down into its operations.

    Args:
        training: The training.
        operations: The operations of one rank's step.
        peak: Bytes by group at the peak of memory (see ``bytes_by_group``).
        predicted: Predicted times.
        profile: Measured times.
        top: Number of heaviest operations and modules to keep.
    """
    gpu = training.gpu
    times = predicted.times if predicted is not None else None
    measured = profile.seconds if profile is not None else None
    table = OperationTable(operations, times, measured, training.scope.selects(operations))
    total = table.total()
    shapes = () if gpu.is_amd else wasteful_shapes(table, gpu.capability, gpu.multiprocessors, training.tf32)
    return OperationBreakdown(
        name=training.name,
        workload=dict(training.workload),
        card=gpu.id,
        gpu_name=gpu.name,
        operations=total.calls,
        flop=total.flop,
        bytes=total.bytes,
        groups=table.groups(peak),
        heaviest=table.heaviest(top),
        unformulated=table.unformulated(),
        by_rule=table.by_rule(),
        aside=table.aside(),
        claims=claims(table),
        shapes=with_gains(shapes, table, predicted.gpu_seconds) if predicted is not None else shapes,
        paddings=paddings(shapes, table, training.workload, predicted.gpu_seconds if predicted is not None else None),
        modules=table.modules(top),
        collectives=table.collectives(),
        seconds=total.seconds if times is not None else None,
        measured_seconds=total.measured if measured is not None else None,
        joined=profile.joined if profile is not None else None,
        published=training.published,
        notes=training.notes,
        experts=training.experts,
    )


def bytes_by_group(trace: AllocationTrace, held: Sequence[int], sizes: Sequence[int]) -> dict[str, int]:
    """Sum the allocations that are results of a step's operations by the group of the operation.

    Weights, optimizer states, inputs and workspaces are not results of operations; the weight copies that autocast
    keeps are, of element-wise operators.

    Args:
        trace: The trace they belong to.
        held: Numbers of the allocations to count, such as those held at the peak.
        sizes: Block size of each allocation of the trace, bytes.
    """
    found: dict[str, int] = dict.fromkeys(GROUPS, 0)
    for number in held:
        origin = trace.origins[number]
        if origin.phase == "load" or trace.labels.get(number) in _NOT_RESULTS:
            continue
        group = group_of(origin.operation)
        if group is not None:
            found[group] = found.get(group, 0) + sizes[number]
    return found
