"""CPU time to launch each operation: Python, the dispatcher, autograd, the allocator and the kernel launch.

The CPU launches operations one after the other.  What one costs depends on its kind and on where it is launched: in a
forward pass of a training (modules' Python code runs between operations), in one that follows another without a
backward pass in between (the same Python, which the CPU's caches still hold), in backward (the autograd engine calls
nodes without Python), or outside of all.  The costs are data, measured on a host (``catalog/hosts.yaml``) or by
``trainatomy calibrate``; this module contains no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from trainatomy.operators.cost import convolution, matmul, recurrence
from trainatomy.operators.operator import LaunchKind
from trainatomy.operators.registry import launch_kind
from trainatomy.operators.traffic import COPIES, is_asynchronous
from trainatomy.results.operations import Call, Operation, Operations
from trainatomy.timing.host_costs import MAPPED_BYTES, CPUCosts, in_python_loops, stacking_seconds

LaunchContext = Literal["graph", "ungraphed", "backward", "plain"]
KINDS = get_args(LaunchKind)

_CACHED_BYTES = 2**20
"""Bytes of an operation that fit a CPU's caches: the time to move them is in the cost of the launch."""
_SHARDED_COLLECTIVES = frozenset({"nccl::all_gather", "nccl::reduce_scatter"})
_COLLATING = frozenset({"aten::stack", "aten::cat"})
_VIEWS_OF_GROUP = 4
"""Views for each group's product: both factors and the result, and the end of its rows."""
_REPLICATE = "python::replicate"
GENERATION = "generation"
"""Name of the loop that only generates, whose costs of a step are those of a call of ``generate()``."""
OTHER = "other"
"""Name, among the costs of hooks of saved tensors and shares of kinds, of those that have none of their own."""
_ON_ARRAYS = "numpy::"
_ON_A_DRIVE = "deepspeed::aio"
_DRIVE_BYTE = 1 / 3e9
"""Seconds for each byte of a transfer between host memory and an NVMe drive: assumed, one drive for each process."""
ACCUMULATION = "accumulation"
"""Name, among the costs of backward, of adding a gradient to another one of the same tensor."""
_ADDITIONS = frozenset({"aten::add", "aten::add_"})
_RESTORING = frozenset({"backward", "recompute"})
"""Phases in which a copy to the GPU brings back what was saved, and no batch."""
_OF_LOOP = "other"
"""Phase of what a loop does outside of the model's passes."""


def kind_of(call: Call) -> LaunchKind:
    """Return the launch kind of a call."""
    arrays = call.inputs + call.outputs
    if arrays and all(array.on_host for array in arrays):
        return "host"
    return "view" if call.is_view else launch_kind(call.name)


def launch_context(operation: Operation, *, graph: bool) -> LaunchContext:
    """Return where an operation is launched; ``graph``: the step's forward pass records one (training).

    A pass of a training that records none, such as a reference model's, takes as long as one that does.
    """
    if operation.phase in ("forward", "recompute"):
        return "graph" if graph and not operation.generated else "ungraphed"
    return "backward" if operation.phase == "backward" else "plain"


def priced_launch(operation: Operation, call: Call, *, graph: bool) -> tuple[LaunchContext, str]:
    """Return where an operation is launched and the name of its cost there; ``graph``: as in ``launch_context``."""
    context, kind = launch_context(operation, graph=graph), kind_of(call)
    accumulates = context == "backward" and kind == "pointwise" and call.name in _ADDITIONS
    return context, ACCUMULATION if accumulates else kind


def batch_bytes(call: Call) -> int:
    """Return the bytes that a call copies from the CPU to the GPU, 0 for other calls.

    A copy of pinned memory (``non_blocking``) is no batch: sharded weights that are kept in host memory, for example.
    A CPU scalar among GPU tensors (``x * torch.tensor(2.0)``) is passed as a kernel argument and does not count.  An
    operation that picks rows of a GPU tensor by indices of the CPU copies the indices.
    """
    if is_asynchronous(call) or not call.outputs or call.outputs[0].on_host:
        return 0
    copies = call.name in COPIES
    from_host = [array.bytes for array in call.inputs if array.on_host and (array.shape or copies)]
    return call.outputs[0].bytes if copies and from_host else sum(from_host)


def batch_seconds(operation: Operation, call: Call, costs: CPUCosts, loop: str) -> float:
    """Return the CPU time of making what an operation copies to the GPU, if it is a batch: of collating its samples."""
    size = batch_bytes(call)
    if not size or operation.phase in _RESTORING:
        return 0.0
    if loop in costs.batch_byte:
        return costs.batch_byte[loop] * size
    return stacking_seconds(call.outputs[0], costs) if operation.phase == _OF_LOOP else 0.0


def _large_host_bytes(call: Call) -> int:
    """Return the bytes that an operation of the CPU reads and writes, 0 if they fit its caches.

    Collating a batch is in ``batch_seconds``.
    """
    if call.name in _COLLATING:
        return 0
    if call.name.startswith(_ON_ARRAYS):
        return int(dict(call.numbers)["bytes"])
    arrays = call.inputs + call.outputs
    if call.is_view or not all(array.on_host for array in arrays):
        return 0
    moved = sum(array.bytes for array in arrays) + sum(call.inputs[place].bytes for place in call.written)
    return moved if moved > _CACHED_BYTES else 0


def _drive_seconds(call: Call) -> float:
    """Return the time in which the CPU waits for a drive."""
    return _DRIVE_BYTE * int(dict(call.numbers)["bytes"]) if call.name == _ON_A_DRIVE else 0.0


def _new_host_bytes(call: Call) -> int:
    """Return the bytes of new tensors of the CPU that are too large for their memory to be kept when they are freed."""
    if call.is_view or call.written or not all(array.on_host for array in call.inputs + call.outputs):
        return 0
    return sum(array.bytes for array in call.outputs if array.bytes >= MAPPED_BYTES)


def list_length(call: Call) -> int:
    """Return the number of tensors in the list arguments of a call."""
    return sum(call.lengths)


def launch_seconds(operations: Operations, costs: CPUCosts, loop: str) -> Iterator[float]:
    """Yield the CPU time of each operation, in order.

    The calls of modules around operations are spread evenly over the operations of their phase.  Operations of a CUDA
    graph cost nothing: their launch does.

    Args:
        operations: The operations of one rank's step.
        costs: CPU costs.
        loop: trainer, trl, pytorch, inference, generation or evaluation (the Trainer's).
    """
    graph = any(operation.phase == "backward" for operation in operations.operations)
    between = seconds_between_operations(operations, costs)
    tables = {
        "graph": costs.graph,
        "ungraphed": {kind: cost * _share_of(costs.without_graph, kind) for kind, cost in costs.graph.items()},
        "backward": costs.backward,
        "plain": costs.plain,
    }
    loops = "in Python loops", len(operations.operations)
    if loops not in operations.on_host:
        operations.on_host[loops] = in_python_loops(operations)
    known: dict[tuple[int, str, bool, int, bool, bool], float] = {}
    for operation, looped in zip(operations.operations, operations.on_host[loops], strict=True):
        if operation.captured:
            yield 0.0
            continue
        key = (operation.call, operation.phase, operation.stream < 0, operation.threads, operation.generated, looped)
        seconds = known.get(key)
        if seconds is None:
            call = operations.calls[operation.call]
            context, what = priced_launch(operation, call, graph=graph)
            seconds = tables[context][what] * (costs.recomputed if operation.phase == "recompute" else 1.0)
            seconds *= costs.looped.get(what, 1.0) if looped and context == "graph" else 1.0
            seconds += between.get(operation.phase, 0.0)
            if call.name in _SHARDED_COLLECTIVES and operation.stream >= 0:  # those that run beside it are not FSDP's
                seconds += costs.sharded_collective
            if what == "list" or call.name == "aten::stack":
                seconds += costs.list_item * list_length(call)
            if what == "recurrent":
                seconds += costs.recurrent_layer.get(context, 0.0) * recurrence.layers(call)
            seconds += seconds_within(call, costs)
            if call.name == _REPLICATE:
                seconds += costs.replicated_module * int(dict(call.numbers)["modules"])
            seconds += batch_seconds(operation, call, costs, loop)
            seconds += _drive_seconds(call)
            seconds += costs.host_byte * _large_host_bytes(call) + costs.new_host_byte * _new_host_bytes(call)
            known[key] = seconds = seconds * operation.threads  # one thread at a time runs Python
        yield seconds


def _share_of(shares: Mapping[str, float], kind: str) -> float:
    return shares.get(kind, shares[OTHER])


def seconds_within(call: Call, costs: CPUCosts) -> float:
    """Return the CPU time of a call in which its first kernel may already run: that of launching the others."""
    kind = kind_of(call)
    if kind == "recurrent":
        return _recurrent_seconds(call, costs)
    if kind == "convolution":
        return costs.inner_kernel * convolution.launches_of_groups(call)
    if waits_first(call):
        return matmul.groups_of(call) * (costs.plain["matmul"] + _VIEWS_OF_GROUP * costs.plain["view"])
    return 0.0


def alternates(call: Call) -> bool:
    """Return whether the CPU launches a call's kernels in turns for two streams, one for each direction."""
    return kind_of(call) == "recurrent" and recurrence.directions(call) == 2


def _recurrent_seconds(call: Call, costs: CPUCosts) -> float:
    """Return the CPU time of launching the kernels of a recurrent network."""
    each = costs.recurrent_launch["backward" if call.name.endswith("backward") else "forward"]
    steps, following = recurrence.launched_steps(call)
    of_steps = each["step"] * steps + each["follower"] * following
    of_steps -= each["misaligned"] * recurrence.misaligned_steps(call)
    return each["kernel"] * recurrence.launches(call) + of_steps + each["part"] * recurrence.launched_parts(call)


def waits_first(call: Call) -> bool:
    """Return whether the CPU waits for the GPU before it launches a call: it reads the sizes of experts' groups.

    ``_grouped_mm`` does so where it has no kernel for the types, and multiplies group by group
    (aten/src/ATen/native/GroupedMMUtils.h).
    """
    return call.name == "aten::_grouped_mm" and not matmul.is_grouped_kernel(call)


def checkpointed_regions(operations: Operations) -> int:
    """Count the regions that are recomputed in backward: stretches of recomputation between backward operations."""
    regions, before = 0, ""
    for operation in operations.operations:
        if operation.phase == "recompute" and before != "recompute":
            regions += operation.repeats
        before = operation.phase
    return regions


def seconds_between_operations(operations: Operations, costs: CPUCosts) -> dict[str, float]:
    """Return Python's own time per operation of a phase: of passes, calls of modules and checkpointed regions."""
    counts: dict[str, int] = {}
    for operation in operations.operations:
        if not operation.captured:
            counts[operation.phase] = counts.get(operation.phase, 0) + operation.repeats
    work = {phase: calls * costs.module_call for phase, calls in operations.module_calls.items()}
    if "recompute" in work:
        work["recompute"] *= costs.recomputed
    micro_steps = count_micro_steps(operations) if counts.get("backward") else 0
    for phase, cost in (("forward", costs.forward_pass), ("backward", costs.backward_pass)):
        if micro_steps:
            work[phase] = work.get(phase, 0.0) + micro_steps * cost
    for counts_of, cost in (
        (operations.sharded_calls, costs.sharded_call),
        (operations.resized_storages, costs.resized_storage),
        (operations.engine_modules, costs.engine_module),
        (operations.engine_gradients, costs.engine_gradient),
    ):
        for phase, count in counts_of.items():
            work[phase] = work.get(phase, 0.0) + count * cost
    regions = checkpointed_regions(operations)
    for phase, pass_ in (("forward", "forward"), ("recompute", "backward")) if regions else ():
        work[phase] = work.get(phase, 0.0) + regions * costs.checkpoint[pass_]
    for called, count in operations.python_calls.items():
        name, _, phase = called.rpartition(".")
        cost = costs.python_call.get(called, costs.python_call.get(name, costs.python_call[OTHER]))
        work[phase] = work.get(phase, 0.0) + count * cost
    return {phase: seconds / counts[phase] for phase, seconds in work.items() if counts.get(phase)}


def loop_seconds(operations: Operations, costs: CPUCosts, loop: str, samples: int = 0) -> dict[str, float]:
    """Return the CPU time that a loop adds to each ``step``, ``micro_step`` and further ``token``.

    ``loop``: as in ``launch_seconds``; a training that generates calls ``generate()`` once in a step.  ``samples``:
    those of a step.
    """
    micro_steps = count_micro_steps(operations)
    modules = operations.modules or operations.module_calls.get("forward", 0) / micro_steps
    walks = costs.parameter_step[loop] * operations.parameters
    optimizes = any(operation.phase == "optimizer" for operation in operations.operations)
    generates = loop != GENERATION and any(operation.generated for operation in operations.operations)
    called = costs.step[GENERATION] if generates else 0.0
    return {
        "step": costs.step[loop]
        + costs.collate[loop]
        + costs.sample[loop] * samples
        + walks
        + costs.optimizer_step[loop] * optimizes
        + called,
        "micro_step": costs.micro_step[loop] + costs.module_micro_step[loop] * modules,
        "token": costs.token,
    }


def count_micro_steps(operations: Operations) -> int:
    """Count the micro-batches of the step.

    A micro-batch that stands for several repeats its operations, except for the last ones, which do not repeat.
    """
    found = {(one.micro_step, one.repeats) for one in operations.operations if not one.generated}
    return sum(dict(sorted(found)).values()) or 1


def cpu_seconds_by_phase(
    operations: Operations, costs: CPUCosts, loop: str, launches: Sequence[float] | None = None
) -> dict[str, float]:
    """Return the CPU time of a step by phase.

    The keys are forward, backward (recomputation included), optimizer, batch (collating and copying) and other.
    ``launches``: what ``launch_seconds`` yields, if that is known.
    """
    found = dict.fromkeys(("forward", "backward", "optimizer", "other", "batch"), 0.0)
    merged = {"recompute": "backward", "zero_grad": "other"}
    batches: dict[tuple[int, str], float] = {}
    if launches is None:
        launches = tuple(launch_seconds(operations, costs, loop))
    for operation, seconds in zip(operations.operations, launches, strict=True):
        place = operation.call, operation.phase
        if (batch := batches.get(place)) is None:
            batch = batches[place] = batch_seconds(operation, operations.calls[operation.call], costs, loop)
        found[merged.get(operation.phase, operation.phase)] += (seconds - batch) * operation.repeats
        found["batch"] += batch * operation.repeats
    loops = loop_seconds(operations, costs, loop)
    tokens = max((operation.repeats for operation in operations.operations if operation.generated), default=0)
    found["other"] += loops["step"] + loops["micro_step"] * count_micro_steps(operations) + loops["token"] * tokens
    if found["optimizer"]:
        found["other"] -= costs.optimizer_step[loop]
        found["optimizer"] += costs.optimizer_step[loop]
    return found


def backward_share(
    operations: Operations, costs: CPUCosts, loop: str, launches: Sequence[float] | None = None
) -> float:
    """Return the share of a step's CPU time that autograd's thread spends, which launches the backward pass.

    ``launches``: as in ``cpu_seconds_by_phase``.
    """
    found = cpu_seconds_by_phase(operations, costs, loop, launches)
    return found["backward"] / (sum(found.values()) or 1.0)
