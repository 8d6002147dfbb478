"""Two clocks side by side: the host issues operations one after the other, the GPU runs them in order.

A kernel starts when it has been issued and the one before it is done.  The host runs ahead of the GPU until its queue
of launches is full, or until it asks for a value (``loss.item()``, a NaN check) or copies a batch, and waits.  The
step lasts as long as the later clock; which of the two it was, and what the GPU was busy with, says what bounds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from trainatomy.results.operations import Call, Operation, Operations
from trainatomy.timing.launch import HostCosts, batch_bytes

QUEUE = 1024
"""Kernels that can be issued and not yet started; a launch beyond waits.  Not documented; the depth at which launches
begin to block on cards since 2017 (CUDA 9 and later)."""

_WAITING = frozenset(
    {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"}
)
_GRADIENTS = frozenset({"backward", "recompute"})


@dataclass(slots=True)
class Course:
    """What became of one step.  ``seconds``: from the end of the step before to its own; ``host_seconds``: the host at
    work; ``gpu_seconds``: kernels running; ``phase_seconds``: how far the later clock came in each phase;
    ``phase_gpu_seconds``: kernels running in each phase."""

    seconds: float
    host_seconds: float
    gpu_seconds: float
    phase_seconds: dict[str, float] = field(default_factory=dict)
    phase_gpu_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Clocks:
    host: float = 0.0
    gpu: float = 0.0
    host_busy: float = 0.0
    gpu_busy: float = 0.0
    queue: deque[tuple[float, int]] = field(default_factory=deque)
    waiting: int = 0

    def catch_up(self) -> None:
        """The host waits until the GPU has done all that was issued."""
        self.host = max(self.host, self.gpu)
        self.queue.clear()
        self.waiting = 0


def waits(call: Call) -> bool:
    """Whether the host waits at this call until the GPU has caught up; bitsandbytes does after each parameter
    (``sync_gpu`` in bitsandbytes/optim/optimizer.py, 0.50)."""
    if call.name in _WAITING or call.name.startswith("bitsandbytes::optimizer_update"):
        return any(not array.on_host for array in call.inputs)
    if batch_bytes(call) or _counts_a_mask(call):
        return True
    return bool(call.outputs) and call.outputs[0].on_host and any(not array.on_host for array in call.inputs)


def _counts_a_mask(call: Call) -> bool:
    """``tensor[mask]``: how much comes out depends on values, as with ``nonzero``, which runs within it."""
    return call.name == "aten::index" and any(
        array.dtype in ("bool", "uint8") and not array.on_host for array in call.inputs[1:]
    )


def run(
    operations: Operations,
    issue: Sequence[float],
    kernels: Sequence[tuple[float, int]],
    costs: HostCosts,
    extra: dict[str, float],
    drains: Collection[int] = (),
) -> Course:
    """Run the step twice, so that it begins as a step in the middle of a training does, and say what the second took.

    ``issue``: seconds of the host for each operation; ``kernels``: for each of ``Operations.calls``, seconds on the
    GPU and number of launches; ``extra``: what the loop itself costs the host, by ``step`` and ``micro_step``;
    ``drains``: operations before which the host waits until the GPU is done, because they give memory back.
    """
    order = operations.unrolled()
    clocks = _Clocks()
    wait_for = [waits(call) for call in operations.calls]
    works_at = _between_backward_and_optimizer(operations, order, wait_for)
    course = Course(0.0, 0.0, 0.0)
    for _ in range(2):
        began = max(clocks.host, clocks.gpu)
        clocks.host_busy = clocks.gpu_busy = 0.0
        course = Course(0.0, 0.0, 0.0)
        micro_step, before = -1, -1
        for place, index in enumerate(order):
            operation = operations.operations[index]
            if place == works_at:
                _work(clocks, extra["step"])
            if operation.micro_step != micro_step or index <= before:  # another one, or the same for another time
                micro_step = operation.micro_step
                _work(clocks, extra["micro_step"])
            before = index
            if index in drains:
                clocks.catch_up()
            _advance(clocks, operation, issue[index], kernels[operation.call], wait_for[operation.call], costs, course)
        course.seconds = max(clocks.host, clocks.gpu) - began
        course.host_seconds, course.gpu_seconds = clocks.host_busy, clocks.gpu_busy
    return course


def _between_backward_and_optimizer(operations: Operations, order: Sequence[int], wait_for: Sequence[bool]) -> int:
    """Where in ``order`` the loop does most of its own work of a step: once backward is over and the Trainer has asked
    whether the loss is a number, for which it waits; then it goes through all parameters to clip their gradients.  So
    the GPU has nothing to do meanwhile.  0 where there is no backward."""
    after = 1 + max(
        (place for place, index in enumerate(order) if operations.operations[index].phase in _GRADIENTS), default=-1
    )
    found = after
    for place in range(after, len(order)) if after else ():
        operation = operations.operations[order[place]]
        if operation.phase == "optimizer":
            break
        if wait_for[operation.call]:
            found = place + 1
    return found


def _work(clocks: _Clocks, seconds: float) -> None:
    clocks.host += seconds
    clocks.host_busy += seconds


def _advance(
    clocks: _Clocks,
    operation: Operation,
    issue: float,
    kernel: tuple[float, int],
    wait: bool,
    costs: HostCosts,
    course: Course,
) -> None:
    before = max(clocks.host, clocks.gpu)
    _work(clocks, issue)
    seconds, launches = kernel
    if launches:
        clocks.waiting += launches
        clocks.gpu = max(clocks.gpu, clocks.host + costs.launch_delay) + seconds
        clocks.gpu_busy += seconds
        clocks.queue.append((clocks.gpu, launches))
        while clocks.queue and (clocks.queue[0][0] <= clocks.host or clocks.waiting > QUEUE):
            done, count = clocks.queue.popleft()
            clocks.host = max(clocks.host, done)
            clocks.waiting -= count
    if wait:
        clocks.catch_up()
        _work(clocks, costs.read)
    phase = operation.phase
    course.phase_seconds[phase] = course.phase_seconds.get(phase, 0.0) + max(clocks.host, clocks.gpu) - before
    course.phase_gpu_seconds[phase] = course.phase_gpu_seconds.get(phase, 0.0) + (seconds if launches else 0.0)
