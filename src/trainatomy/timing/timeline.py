"""Replay one step on its timelines: the CPU launches operations, and the GPU executes them with one queue per stream.

A kernel starts when the CPU has launched it, the kernel before it in the same stream has finished, and so have the
operations of other streams that it depends on (``Operations.dependencies``).  The many kernels of a recurrent layer
start with the first one, and end no earlier than the last one is launched.  Streams run side by side at full speed,
except that kernels beside a collective take longer (``contention.py``).

A collective takes its stream as a kernel does; other ranks are taken to be as fast as this one, so that none waits for
another.

The CPU runs ahead of the GPU until a stream's launch queue is full, or until it reads a value (``loss.item()``, a NaN
check) or copies a batch: then it waits for the stream of that operation.  An operation of more kernels than a queue
holds runs on streams of its own: the CPU waits until one queue holds the rest, which is not in the way of what comes
next.  Streams do not wait for stream 0 implicitly, because PyTorch's streams are created with
``cudaStreamNonBlocking`` (c10/cuda/CUDAStream.cpp).  ``cudaFree`` waits for all streams.

After a wait for the GPU, the loop's work of a step takes longer (``CPUCosts.after_wait``).  A wait counts less the
longer the CPU has worked since.

The step ends when the CPU and every stream are done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from trainatomy.operators.registry import find
from trainatomy.operators.traffic import is_asynchronous
from trainatomy.results.operations import Call, Operations
from trainatomy.timing.contention import Contention
from trainatomy.timing.host_costs import CPUCosts
from trainatomy.timing.launch import alternates, batch_bytes, seconds_within, waits_first
from trainatomy.timing.one_stream import COLLECTIVES, LoopWork, StepTimeline, replay_one_stream, row_of
from trainatomy.timing.streams import OnLaunch, replay_streams

_BACKWARD_PHASES = frozenset({"backward", "recompute"})


def blocks_cpu(call: Call) -> bool:
    """Return whether the CPU waits at this call until the GPU has caught up."""
    if is_asynchronous(call):
        return False
    operator = find(call.name)
    if operator is not None and operator.sync:
        return any(not array.on_host for array in call.inputs)
    if batch_bytes(call) or _counts_a_mask(call):
        return True
    return bool(call.outputs) and call.outputs[0].on_host and any(not array.on_host for array in call.inputs)


def _counts_a_mask(call: Call) -> bool:
    """Return whether the call is ``tensor[mask]``: its output size depends on values, through ``nonzero`` inside it."""
    return call.name == "aten::index" and any(
        array.dtype in ("bool", "uint8") and not array.on_host for array in call.inputs[1:]
    )


class LaunchCosts(NamedTuple):
    """The CPU's times in a step.

    Attributes:
        launch_seconds: Time to launch each operation.
        costs: CPU costs; ``read``, ``launch_delay``, ``after_wait`` and ``long_wait`` are used here.
        loop_seconds: Time that the training loop adds to each ``step``, ``micro_step`` and further ``token``.
        synchronized: Indices of operations before which the CPU waits for all streams, because memory is freed.
    """

    launch_seconds: Sequence[float]
    costs: CPUCosts
    loop_seconds: Mapping[str, float]
    synchronized: Collection[int] = ()


def replay_step(
    operations: Operations,
    kernels: Sequence[tuple[float, int]],
    launch: LaunchCosts,
    on_launch: OnLaunch | None = None,
    contention: Contention | None = None,
) -> StepTimeline:
    """Replay the step twice, so that it starts as in the middle of a training, and return the second timeline.

    Args:
        operations: The operations of one rank's step.
        kernels: For each of ``operations.calls``, seconds on the GPU and number of kernels.
        launch: The CPU's times.
        on_launch: See ``replay_streams``.
        contention: See ``replay_streams``.
    """
    costs, order = launch.costs, operations.unrolled()
    blocking = [blocks_cpu(call) for call in operations.calls]
    loop_position = _position_of_loop_work(operations, order, blocking)
    work = _work_of_loop(operations, loop_position, launch.loop_seconds, costs.after_wait)
    within = [seconds_within(call, costs) for call in operations.calls]
    alternating = [alternates(call) for call in operations.calls]
    waiting = [waits_first(call) for call in operations.calls]
    calls = [one.call for one in operations.operations]
    waits = [waiting[call] for call in calls]
    for index in launch.synchronized:
        waits[index] = True
    columns = (
        launch.launch_seconds,
        *([column[call] for call in calls] for column in zip(*kernels, strict=True)),
        [one.phase for one in operations.operations],
        [one.stream for one in operations.operations],
        [blocking[call] for call in calls],
        waits,
        [within[call] for call in calls],
        [alternating[call] for call in calls],
    )
    rows = list(map(row_of, zip(*columns, strict=True)))
    if on_launch is None and has_one_stream(operations):
        return replay_one_stream(operations, order, rows, work, costs)
    return replay_streams(operations, order, rows, work, costs, on_launch, contention)


def has_one_stream(operations: Operations) -> bool:
    """Return whether a step uses one stream, waits for no operation and does not communicate."""
    communicates = any(call.name.startswith(COLLECTIVES) for call in operations.calls)
    waits = operations.dependencies or operations.cpu_waits
    return len({one.stream for one in operations.operations}) == 1 and not waits and not communicates


def _work_of_loop(
    operations: Operations, loop_position: int, loop_seconds: Mapping[str, float], after_wait: float
) -> dict[int, list[LoopWork]]:
    """Return the CPU time that the training loop adds before operations, by their places in the unrolled step."""
    step = loop_seconds["step"]
    work = {loop_position: [LoopWork(step, step * after_wait if loop_position else 0.0)]}
    place, micro_step, was_generated = 0, -1, False
    for repeats, block in operations.blocks():
        for repetition in range(repeats):
            for offset, index in enumerate(block):
                operation, again = operations.operations[index], repetition > 0 and offset == 0
                if operation.generated:
                    begins = "" if was_generated and not again else "token"
                else:
                    begins = "" if operation.micro_step == micro_step and not again else "micro_step"
                    micro_step = operation.micro_step
                if begins:
                    work.setdefault(place + offset, []).append(LoopWork(loop_seconds[begins]))
                was_generated = operation.generated
            place += len(block)
    return work


def _position_of_loop_work(operations: Operations, order: Sequence[int], blocking: Sequence[bool]) -> int:
    """Return where in ``order`` the loop does most of its own work of a step; 0 if there is no backward pass.

    That is after backward, once the Trainer has checked the loss for NaN, for which it waits: it then walks all
    parameters to clip their gradients, and the GPU is idle meanwhile.
    """
    after = next(
        (
            place + 1
            for place in reversed(range(len(order)))
            if operations.operations[order[place]].phase in _BACKWARD_PHASES
        ),
        0,
    )
    found = after
    for place in range(after, len(order)) if after else ():
        operation = operations.operations[order[place]]
        if operation.phase == "optimizer":
            break
        if blocking[operation.call]:
            found = place + 1
    return found
