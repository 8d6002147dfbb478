"""What issuing an operation costs the host: Python, the dispatcher, autograd, the allocator and the launch.

The host issues operations one after the other.  Each costs a time that depends on its kind and on where it is issued:
in a forward that records a graph (Python code of modules runs between operations), in backward (the engine calls
nodes, no Python runs), or outside of both.  The costs are data, measured on a host (``facts/hosts.yaml``) or by
``trainatomy calibrate``; nothing here knows a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainatomy.results.operations import Call, Operation, Operations

Place = Literal["graph", "backward", "plain"]
KINDS = (
    "view",
    "pointwise",
    "copy",
    "reduction",
    "matmul",
    "convolution",
    "attention",
    "normalisation",
    "dropout",
    "index",
    "list",
    "library",
    "host",
)

_MATMULS = frozenset("mm addmm bmm baddbmm addmv mv dot linear _grouped_mm _scaled_mm _int_mm".split())
_INDEXING = frozenset(
    "index index_put index_put_ _index_put_impl_ index_add index_add_ index_select gather scatter scatter_ "
    "scatter_add scatter_add_ scatter_reduce masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select "
    "where nonzero cumsum sort argsort topk _unique2 searchsorted bincount histc one_hot embedding "
    "embedding_dense_backward embedding_bag".split()
)
_REDUCTIONS = frozenset(
    "sum mean linalg_vector_norm amax amin max min any all prod std var var_mean logsumexp argmax argmin "
    "isinf isnan".split()
)
_COPIES = frozenset("_to_copy copy_ clone contiguous cat stack".split())
_CROSSING = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone"})


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds that the host needs.

    ``graph``, ``backward``, ``plain``: for one operation of each of ``KINDS``, by where it is issued; ``list_item``:
    for each tensor of a list argument; ``module_call``: for calling one module; ``checkpoint``: for entering a
    checkpointed region, in forward and again in backward (states of random generators); ``optimizer_step``: for
    entering the optimizer's step, hooks and the scheduler's included.

    By loop (trainer, pytorch, inference): ``step`` and ``micro_step``: what it adds to each; ``module_step`` and
    ``module_micro_step``: what it adds for each module (walks over parameters, ``model.train()``); ``batch_byte``: for
    each byte of a batch, collated, pinned and copied to the GPU.

    ``read``: for waking up after waiting for the GPU; ``launch_delay``: from issuing a kernel until it can start on an
    idle GPU.
    """

    graph: Mapping[str, float]
    backward: Mapping[str, float]
    plain: Mapping[str, float]
    list_item: float
    module_call: float
    checkpoint: float
    optimizer_step: float
    step: Mapping[str, float]
    micro_step: Mapping[str, float]
    module_step: Mapping[str, float]
    module_micro_step: Mapping[str, float]
    batch_byte: Mapping[str, float]
    read: float
    launch_delay: float


PARTS = {
    "graph": ("graph", "module_call", "checkpoint"),
    "backward": ("backward",),
    "plain": ("plain", "list_item", "optimizer_step"),
    "loop": ("step", "micro_step", "module_step", "module_micro_step"),
    "batch": ("batch_byte",),
}
"""The costs by the part of a step in which they show: a host is faster or slower than another in each."""


def from_microseconds(table: Mapping[str, Any], factors: Mapping[str, float] | None = None) -> HostCosts:
    """The costs as a data file has them, of a host that takes ``factors`` times as long in each of ``PARTS``."""
    costs = _scaled(table, 1e-6)
    for part, factor in (factors or {}).items():
        costs |= {name: _scaled(costs[name], factor) for name in PARTS[part]}
    return HostCosts(**costs)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {name: _scaled(item, factor) for name, item in value.items()}
    return value * factor


@cache
def kind(name: str) -> str:
    """The kind of the operator of this name (``aten::addmm``), which is not a view and runs on the GPU. ``library``:
    of a library that does its bookkeeping in Python around each call (bitsandbytes)."""
    if name.startswith("bitsandbytes::"):
        return "library"
    short = name.rpartition("::")[2].partition(".")[0]
    if short in _MATMULS:
        return "matmul"
    if "convolution" in short:
        return "convolution"
    if "attention" in short:
        return "attention"
    if any(part in short for part in ("layer_norm", "rms_norm", "batch_norm", "group_norm")):
        return "normalisation"
    if short.startswith(("_foreach", "_fused", "_amp_foreach")):
        return "list"
    if "dropout" in short:
        return "dropout"
    if short in _INDEXING:
        return "index"
    if short in _REDUCTIONS or "softmax" in short or "nll" in short:
        return "reduction"
    return "copy" if short in _COPIES else "pointwise"


def kind_of(call: Call) -> str:
    """The kind of a call: one of ``KINDS``."""
    arrays = call.inputs + call.outputs
    if arrays and all(array.on_host for array in arrays):
        return "host"
    return "view" if call.is_view else kind(call.name)


def place_of(operation: Operation, *, graph: bool) -> Place:
    """Where an operation is issued. ``graph``: the forward records one (training, not inference)."""
    if operation.phase in ("forward", "recompute"):
        return "graph" if graph else "plain"
    return "backward" if operation.phase == "backward" else "plain"


def batch_bytes(call: Call) -> int:
    """Bytes that a call copies from the host to the GPU; 0 for other calls. A single number of the host beside tensors
    of the card (``x * torch.tensor(2.0)``) travels as an argument of the kernel."""
    from_host = any(array.on_host and (array.shape or call.name in _CROSSING) for array in call.inputs)
    if not from_host or not call.outputs or call.outputs[0].on_host:
        return 0
    return call.outputs[0].bytes


def listed(call: Call) -> int:
    """How many tensors the list arguments of a call hold."""
    return sum(call.lengths)


def issue_seconds(operations: Operations, costs: HostCosts, loop: str) -> Iterator[float]:
    """What the host needs for each operation, in order: itself, and the calls of modules around it, spread evenly over
    the operations of the phase. ``loop``: trainer, pytorch or inference."""
    graph = any(operation.phase == "backward" for operation in operations.operations)
    between = _between_operations(operations, costs)
    tables = {"graph": costs.graph, "backward": costs.backward, "plain": costs.plain}
    known: dict[tuple[int, str], float] = {}
    for operation in operations.operations:
        key = (operation.call, operation.phase)
        seconds = known.get(key)
        if seconds is None:
            call = operations.calls[operation.call]
            what = kind_of(call)
            seconds = tables[place_of(operation, graph=graph)][what] + between.get(operation.phase, 0.0)
            if what == "list" or call.name == "aten::stack":
                seconds += costs.list_item * listed(call)
            seconds += costs.batch_byte[loop] * batch_bytes(call)
            known[key] = seconds
        yield seconds


def checkpointed_regions(operations: Operations) -> int:
    """How many regions of the step are computed again in backward (stretches of recomputation between backward)."""
    regions, before = 0, ""
    for operation in operations.operations:
        if operation.phase == "recompute" and before != "recompute":
            regions += operation.repeats
        before = operation.phase
    return regions


def _between_operations(operations: Operations, costs: HostCosts) -> dict[str, float]:
    """Seconds of Python's own work for each operation of a phase: calls of modules, checkpointed regions."""
    counts: dict[str, int] = {}
    for operation in operations.operations:
        counts[operation.phase] = counts.get(operation.phase, 0) + operation.repeats
    work = {phase: calls * costs.module_call for phase, calls in operations.module_calls.items()}
    regions = checkpointed_regions(operations) * costs.checkpoint
    for phase in ("forward", "recompute") if regions else ():
        work[phase] = work.get(phase, 0.0) + regions
    return {phase: seconds / counts[phase] for phase, seconds in work.items() if counts.get(phase)}


def loop_seconds(operations: Operations, costs: HostCosts, loop: str) -> dict[str, float]:
    """What the loop adds to each ``step`` and ``micro_step``. ``loop``: trainer, pytorch or inference."""
    micro_steps = _micro_steps(operations)
    modules = operations.module_calls.get("forward", 0) / micro_steps
    optimizes = any(operation.phase == "optimizer" for operation in operations.operations)
    return {
        "step": costs.step[loop] + costs.module_step[loop] * modules + costs.optimizer_step * optimizes,
        "micro_step": costs.micro_step[loop] + costs.module_micro_step[loop] * modules,
    }


def _micro_steps(operations: Operations) -> int:
    """How many micro-batches the step has; one that stands for others ends with operations that do not repeat."""
    repeats: dict[int, int] = {}
    for operation in operations.operations:
        repeats[operation.micro_step] = max(operation.repeats, repeats.get(operation.micro_step, 0))
    return sum(repeats.values()) or 1


def host_seconds(operations: Operations, costs: HostCosts, loop: str) -> dict[str, float]:
    """What a step costs the host in forward, backward (recomputation included), optimizer, and between: for its
    batches (``batch``) and for everything else (``other``)."""
    found = dict.fromkeys(("forward", "backward", "optimizer", "other", "batch"), 0.0)
    merged = {"recompute": "backward", "zero_grad": "other"}
    for operation, seconds in zip(operations.operations, issue_seconds(operations, costs, loop), strict=True):
        batch = costs.batch_byte[loop] * batch_bytes(operations.calls[operation.call])
        found[merged.get(operation.phase, operation.phase)] += (seconds - batch) * operation.repeats
        found["batch"] += batch * operation.repeats
    loops = loop_seconds(operations, costs, loop)
    found["other"] += loops["step"] + loops["micro_step"] * _micro_steps(operations)
    if found["optimizer"]:
        found["other"] -= costs.optimizer_step
        found["optimizer"] += costs.optimizer_step
    return found
