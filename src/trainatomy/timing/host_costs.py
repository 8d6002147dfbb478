"""What launching operations costs the CPU of a host, and what its loops add (``catalog/hosts.yaml``).

The cost to the host of an operator's first call with new shapes; the costs are in ``catalog/first_calls.yaml``.

Find loops written in Python: stretches in which one module launches the same operations again and again.

The CPU launches views, copies and the like sooner there than between a model's modules: the code of a turn is short,
so that its caches hold all of it.  A recurrence over the positions of a sequence is the usual case.

CPU time of the memory that the caching allocator takes from the driver and gives back during a step.

Most steady steps need none: the cache serves every request.  Close to the memory limit the allocator frees its cache
and takes new segments in every step, and ``cudaFree`` waits until the GPU has finished all work launched before.

The costs of ``cudaMalloc`` and ``cudaFree`` by size are measured by ``trainatomy calibrate``
(``sections.device.memory``).  Most of that is the driver's work on the CPU, so a GPU without a calibration uses the
nearest GPU's figures unscaled.  Assumed: pages of expandable segments cost as much as a segment of the same size, and
a refused request as much as the smallest segment.

CPU time of stacking samples into a batch.

``torch.stack`` copies one sample after the other, each by a thread for every 32,768 of its elements, which wake up for
it (aten/src/ATen/native/TensorShape.cpp).  The memory of a batch of 32 MiB or more is new in every step, as the C
library maps it and gives it back, and the operating system hands out its pages while they are written: that takes
longer than the copy.

On the machine of an H200 (torch 2.11, 16 threads, 2.2 times as slow as a quiet one, 2026-11-28;
``lab/timing/records/stacks-h200.jsonl``) batches of samples of 120, 200 and 600 kB took 0.23, 0.17 and 0.10 ns a
byte if they were smaller, and 0.64, 0.39 and 0.19 ns if they were larger.  In trainings it takes 1.6 times as long:
threads have waited for longer, and samples are not in the CPU's caches.  That factor is from 388 steps
(``records/trainings-*.jsonl.gz``) whose batches have more than 3 MB.  With families left out, 97 of them that the GPU
bounds are met within 2.3 % in the median and 6.2 % in nine of ten, instead of 3.9 and 9.0 % by bytes alone.  Where one
thread stacks, as in processes that ``torchrun`` starts, no step was measured, and the factor is left out: there new
tensors took 0.5 ns a byte beside a host that was 2 times as slow (``catalog/hosts.yaml``), as much as without it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count
from math import ceil
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from trainatomy.catalog.calibrations import Calibration, shipped
from trainatomy.catalog.files import read_yaml
from trainatomy.lookup import on_line
from trainatomy.operators.cost import depthwise
from trainatomy.operators.cost.kernel import HALVES, number
from trainatomy.results.operations import Array, Call, Operations
from trainatomy.results.trace import DriverAction, DriverCall
from trainatomy.timing.cost_model import nearest_calibration

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU


_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Names of convolutions, and the place of the input among their tensors; the weight follows it."""
_ATTENTION = "aten::_scaled_dot_product_cudnn_attention"


class _Plan(NamedTuple):
    """A call whose first one with these shapes makes cuDNN plan it: its cost's name, and what plans are kept for."""

    cost: str
    name: str
    shapes: object
    numbers: object


def first_call_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return the seconds that calls take longer when their shapes have not occurred, except in the calls ``before``.

    cuDNN keeps a plan for each shape, order in memory and setting: attention forward with the sums that backward needs
    and without them are two plans (``MHAParams`` in aten/src/ATen/native/cudnn/MHA.cpp), a convolution forward is one.
    """
    known = _known()
    return sum(known[plan.cost] for plan in _plans(calls) - _plans(before))


def first_evaluation_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return the seconds that the first evaluation of a process takes longer, by its calls and those of the step."""
    return _known()["first_evaluation"] + first_call_seconds(calls, before)


def first_on_machine_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return what a first evaluation takes even longer on a machine on which no process has run one."""
    compiles = any(plan.name == _ATTENTION for plan in _plans(calls) - _plans(before))
    return _known()["first_on_machine"] if compiles else 0.0


def _plans(calls: Iterable[Call]) -> set[_Plan]:
    return {
        _Plan(cost, call.name, tuple((array.shape, array.strides) for array in call.inputs), call.numbers)
        for call in calls
        if (cost := _cost_of(call))
    }


def _cost_of(call: Call) -> str:
    """Return the name of what planning a call costs; empty if cuDNN does not run it."""
    place = _CONVOLUTIONS.get(call.name)
    if place is None:
        return call.name if call.name in _known() else ""
    x, weight = call.inputs[place : place + 2]
    if x.on_host:
        return ""
    if int(number(call, "groups", "1")) == 1 or weight.shape[1] > 1:
        return call.name
    if depthwise.kind_of(call, x, weight) == "own":
        return ""
    return f"{call.name} depthwise" if x.dtype in HALVES else call.name


def _known() -> dict[str, float]:
    return cast("dict[str, float]", read_yaml("first_calls.yaml"))


LONGEST_TURN = 24
"""Operations of a turn at most.  A layer of a model launches more, and so does a module that several layers share."""
LEAST_TURNS = 8
_PHASES = frozenset({"forward", "recompute"})


def in_python_loops(operations: Operations) -> list[bool]:
    """Return for each operation whether it belongs to a loop of a forward pass: to one of several equal turns in a row.

    Turns are equal if they launch the same operators on inputs and outputs of the same shapes and types, in the same
    module.
    """
    numbers: dict[object, int] = {}
    looped = {one.call for one in operations.operations if one.phase in _PHASES}
    of_call = {place: _form(operations.calls[place], numbers) for place in sorted(looped)}
    forms = [
        # an operation of another phase equals no other
        _number((of_call[one.call], one.phase, one.module), numbers) if one.phase in _PHASES else -1 - place
        for place, one in enumerate(operations.operations)
    ]
    found = [False] * len(forms)
    for turn in range(1, LONGEST_TURN + 1):
        for begin, end in _equal_stretches(forms, turn):
            if end - begin >= (LEAST_TURNS - 1) * turn:
                found[begin : end + turn] = [True] * (end + turn - begin)
    return found


def _equal_stretches(forms: Sequence[int], turn: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of stretches in which each operation equals the one that is a turn later."""
    begin = end = 0
    for place in compress(count(), map(eq, forms, forms[turn:])):
        if place > end:
            if end > begin:
                yield begin, end
            begin = place
        end = place + 1
    if end > begin:
        yield begin, end


def _form(call: Call, numbers: dict[object, int]) -> int:
    arrays = tuple(tuple((one.shape, one.dtype, one.on_host) for one in part) for part in (call.inputs, call.outputs))
    return _number((call.name, arrays), numbers)


def _number(key: object, numbers: dict[object, int]) -> int:
    return numbers.setdefault(key, len(numbers))


Curve = tuple[tuple[int, float], ...]
"""(bytes, seconds) points, sorted by bytes."""
_RELEASES: frozenset[DriverAction] = frozenset({"free", "unmap"})


class DriverWork(NamedTuple):
    """CPU time that the driver takes before an operation is launched, and whether it waits for the GPU first."""

    seconds: float
    waits: bool


@dataclass(frozen=True, slots=True)
class DriverCosts:
    """Seconds that the driver needs to allocate and to free memory, by size."""

    allocate: Curve
    free: Curve

    def seconds(self, action: DriverAction, size: int) -> float:
        """Return the CPU time of one request of ``size`` bytes."""
        if action == "refused":
            return self.allocate[0][1]
        return on_line(self.free if action in _RELEASES else self.allocate, size, after=True)


def driver_costs(gpu: GPU, calibration: Calibration | None = None) -> DriverCosts:
    """Return the costs by ``calibration``, else by the GPU's shipped calibration, else by the nearest GPU's."""
    for one in (calibration, shipped().get(gpu.card), nearest_calibration(gpu)):
        rows = one.sections.get("device", {}).get("memory", ()) if one else ()
        if rows:
            return DriverCosts(_curve(rows, "malloc_us"), _curve(rows, "free_us"))
    return DriverCosts(((0, 0.0),), ((0, 0.0),))


def _curve(rows: Sequence[Mapping[str, float]], name: str) -> Curve:
    return tuple(sorted((int(row["bytes"]), row[name] * 1e-6) for row in rows))


def driver_work(operations: Operations, calls: Iterable[DriverCall], costs: DriverCosts) -> dict[int, DriverWork]:
    """Return the driver's work caused by each operation of the step, by index in ``operations.operations``.

    A step that frees nothing keeps the memory it takes, so the next step finds it in the cache: its driver calls are
    not part of a steady step, and the result is empty.

    Args:
        operations: The operations of one step.
        calls: The driver calls of the whole allocation trace, whose events ``Operation.event`` counts; those before
            the step are ignored.
        costs: Cost of each driver call.
    """
    begins = [operation.event for operation in operations.operations]
    found: dict[int, DriverWork] = {}
    for event, action, size in calls:
        index = bisect_right(begins, event) - 1
        if index >= 0:
            seconds, waits = found.get(index, DriverWork(0.0, False))
            found[index] = DriverWork(seconds + costs.seconds(action, size), waits or action in _RELEASES)
    return found if any(work.waits for work in found.values()) else {}


MAPPED_BYTES = 2**25
"""From how many bytes on the C library asks the operating system for each tensor's memory and gives it back at once.

glibc's ``M_MMAP_THRESHOLD`` grows with what a process frees, up to this size (mallopt(3)).
"""
_GRAIN = 32768
"""Elements that one thread copies at least: ``at::internal::GRAIN_SIZE``."""
_ALONE = 0.612
"""What one thread takes, as measured apart, as a share of what it takes among several in a training."""
_PAGED_AT_ONCE = 5
"""Threads beyond which pages are handed out no faster: results of 16 threads (``new_host_byte``) take as long."""


def stacking_seconds(batch: Array, costs: CPUCosts) -> float:
    """Return the CPU time of stacking the samples of a batch."""
    samples = batch.shape[0] if batch.shape else 1
    threads = min(ceil(batch.elements / max(samples, 1) / _GRAIN), costs.threads)
    if not threads:
        return 0.0
    byte = costs.stacking["byte"] / threads
    if batch.bytes >= MAPPED_BYTES:
        byte += costs.stacking["page_byte"] / min(threads, _PAGED_AT_ONCE)
    if costs.threads == 1:
        byte *= _ALONE
    return samples * costs.stacking["thread"] * (threads - 1) + batch.bytes * byte


@dataclass(frozen=True, slots=True)
class CPUCosts:
    """CPU costs in seconds.

    Attributes:
        graph: Launching one operation of each of ``launch.KINDS`` in a forward pass of a training.
        without_graph: The same in generation, evaluation and inference, as a share of ``graph``; see ``launch.OTHER``.
        recomputed: The same in recomputation in backward, calls of modules included, as a share of ``graph``.
        looped: The same in a loop written in Python (``python_loops``), as a share of ``graph``, by kind; of others: 1.
        backward: The same in backward, and of adding up the gradients of a tensor (``launch.ACCUMULATION``), which
            autograd's engine does between its nodes.
        plain: The same outside of both.
        list_item: Each tensor of a list argument.
        module_call: Calling one module.
        forward_pass: What the forward pass of each micro-batch of a training takes besides its operations and modules:
            contexts that are entered and left, code that the CPU's caches have lost since the last one.
        backward_pass: The same of each backward pass: autograd's engine and its threads wake up, and free the graph.
        checkpoint: A checkpointed region, by where it is entered: forward, or backward, to be recomputed.
        python_call: A call of a hook of saved tensors, by the class that has it and the phase, or of what
            ``simulator.python_calls`` counts, with the Python code around it; see ``launch.OTHER``.
        optimizer_step: Entering the optimizer's step, including its hooks and the scheduler's, by loop.
        step: Time that a loop (trainer, trl, pytorch, inference, generation, evaluation) adds to each step.
        collate: Time that it adds to a step besides, to make a batch of samples.
        sample: Time that it adds for each sample: the loader draws its index and asks the data set for it.
        micro_step: Time that a loop adds to each micro-batch.
        token: Time that ``generate()`` adds to each further token.
        module_micro_step: Time that a loop adds to each micro-batch for each module (``model.train()``).
        parameter_step: Time that a loop adds to each step for each parameter tensor (walks over them, clipping).
        batch_byte: Each byte of a batch, by loop, where samples are not stacked: they are lists of tokens, or the
            batch is there.
        stacking: Stacking samples into a batch: each ``byte`` by one thread, each byte of new pages by one thread
            besides (``page_byte``), and waking up each further ``thread`` for each sample.
        threads: Threads that work on a tensor of the CPU.
        read: Waking up after waiting for the GPU.
        after_wait: How much longer the loop's work of a step takes after a long wait for the GPU, as a share of it:
            what it touches has left the CPU's caches.
        long_wait: A wait after which it takes that much longer; after a shorter one, proportionally less.
        launch_delay: From launching a kernel until it can start on an idle GPU.
        sharded_call: Calling an operator with sharded tensors (``DTensor``), besides the operations inside it.
        sharded_collective: FSDP's Python around gathering the weights of a layer, or around reducing its gradients.
        resized_storage: FSDP's Python around taking or freeing the memory of one gathered weight.
        engine_module: DeepSpeed's Python (ZeRO-3) around one module in forward or backward.
        engine_gradient: DeepSpeed's Python for one gradient.
        replicated_module: ``DataParallel``'s Python for one copy of one module.
        host_byte: Reading or writing a byte of host memory in an operation on large tensors of the CPU, by all threads.
        new_host_byte: Each byte of a large new tensor of the CPU besides: the operating system hands out its pages.
        one_thread_byte: The same as both by one thread, as in processes that ``torchrun`` starts.
        recurrent_layer: Each layer and direction of a recurrent network, by where it is launched.
        recurrent_launch: What cuDNN launches inside of one, by pass: each ``kernel``, each ``step`` of a layer that is
            not fused, each direction of the layer below for which such a step waits (``follower``), and each ``part``
            of the sequence beyond the first for which a layer's inputs are multiplied; what a step of ``misaligned``
            rows takes less.
        inner_kernel: Each kernel that cuDNN launches for a group that it convolves alone.
    """

    graph: Mapping[str, float]
    without_graph: Mapping[str, float]
    recomputed: float
    looped: Mapping[str, float]
    backward: Mapping[str, float]
    plain: Mapping[str, float]
    list_item: float
    module_call: float
    forward_pass: float
    backward_pass: float
    checkpoint: Mapping[str, float]
    python_call: Mapping[str, float]
    optimizer_step: Mapping[str, float]
    step: Mapping[str, float]
    collate: Mapping[str, float]
    sample: Mapping[str, float]
    micro_step: Mapping[str, float]
    token: float
    module_micro_step: Mapping[str, float]
    parameter_step: Mapping[str, float]
    batch_byte: Mapping[str, float]
    stacking: Mapping[str, float]
    threads: int
    read: float
    after_wait: float
    long_wait: float
    launch_delay: float
    sharded_call: float = 0.0
    sharded_collective: float = 0.0
    resized_storage: float = 0.0
    engine_module: float = 0.0
    engine_gradient: float = 0.0
    host_byte: float = 0.0
    new_host_byte: float = 0.0
    one_thread_byte: float = 0.0
    replicated_module: float = 0.0
    recurrent_layer: Mapping[str, float] = field(default_factory=dict)
    recurrent_launch: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    inner_kernel: float = 0.0


PARTS = {
    "graph": (
        "graph",
        "module_call",
        "forward_pass",
        "checkpoint",
        "python_call",
        "sharded_call",
        "sharded_collective",
        "resized_storage",
        "engine_module",
        "engine_gradient",
        "replicated_module",
    ),
    "backward": ("backward", "backward_pass", "recurrent_layer", "recurrent_launch", "inner_kernel"),
    "plain": ("plain", "list_item", "optimizer_step"),
    "loop": ("step", "collate", "sample", "micro_step", "token", "module_micro_step", "parameter_step"),
    "batch": ("batch_byte", "stacking"),
}
"""Fields of ``CPUCosts`` by part of a step; a calibration has a factor for each part."""
PYTHON_COLLATING = frozenset({"trl"})
"""Loops whose batches are made of lists of tokens, in Python; others copy samples."""


def cpu_costs(
    microseconds: Mapping[str, Any],
    factors: Mapping[str, float] | None = None,
    pace: float = 1.0,
    recurrent_exponent: float = 1.0,
    copy_exponent: float = 1.0,
) -> CPUCosts:
    """Build the costs from microseconds as in ``hosts.yaml``.

    Args:
        microseconds: The costs.
        factors: What each of ``PARTS`` is multiplied by.
        pace: What all of ``PARTS`` are multiplied by besides.
        recurrent_exponent: Power of the pace with which ``recurrent_launch`` grows.
        copy_exponent: Power of the pace with which ``stacking`` grows, and ``batch_byte`` but for ``PYTHON_COLLATING``.
    """
    shares = {name: microseconds[name] for name in ("without_graph", "recomputed", "looped", "after_wait", "threads")}
    costs = _scaled(microseconds, 1e-6) | shares
    for part, names in PARTS.items():
        factor = (factors or {}).get(part, 1.0) * pace
        costs |= {name: _scaled(costs[name], factor) for name in names}
    costs["recurrent_launch"] = _scaled(costs["recurrent_launch"], pace ** (recurrent_exponent - 1))
    costs["stacking"] = _scaled(costs["stacking"], pace ** (copy_exponent - 1))
    costs["batch_byte"] = {
        loop: seconds if loop in PYTHON_COLLATING else seconds * pace ** (copy_exponent - 1)
        for loop, seconds in costs["batch_byte"].items()
    }
    return CPUCosts(**costs)


def not_collating(costs: CPUCosts) -> CPUCosts:
    """Return the costs of a loop for which a function returns batches as they are."""
    return replace(
        costs,
        batch_byte=dict.fromkeys(costs.batch_byte, 0.0),
        stacking=dict.fromkeys(costs.stacking, 0.0),
        collate=dict.fromkeys(costs.collate, 0.0),
    )


def by_one_thread(costs: CPUCosts) -> CPUCosts:
    """Return the costs of a process whose operations on tensors of the CPU run on one thread."""
    return replace(costs, host_byte=costs.one_thread_byte, new_host_byte=0.0, threads=1)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {name: _scaled(item, factor) for name, item in value.items()}
    return value * factor
