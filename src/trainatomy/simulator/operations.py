"""Writes the operations of the last executed step: distinct calls once, and every operation in launch order.

The recorder passes each aten operation after it ran.  Where PyTorch acts otherwise under a dispatch mode than on a GPU
(gradients that the engine accumulates, zeros that are filled in place), the operation is written as on the GPU; where a
kernel is simulated by smaller operations, ``operators.allocation.whole.one_operation`` writes it as one.

Order between operations of several streams: what each has to wait for, by the indices of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainatomy.results.operations import CAST_FROM, GRAPH_LAUNCH, Call, Operation, Operations
from trainatomy.results.time import StageRun, Work
from trainatomy.simulator.calls import StorageNumbers, TensorKey, arrays, call_of, storages_in, text
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.storages import Storages
from trainatomy.simulator.streams import Streams, SyncKind

_NONE: frozenset[int] = frozenset()


class OperationOrder:
    """Notes which operations have to be over before the next one of a stream, or of the CPU, begins."""

    def __init__(self) -> None:
        self._last: dict[int, frozenset[int]] = {}
        self._awaited: dict[int, frozenset[int]] = {}
        self._recorded: dict[int, frozenset[int]] = {}
        self._cpu_awaits = _NONE

    def clear(self) -> None:
        """Forget all operations: a step begins."""
        for table in (self._last, self._awaited, self._recorded):
            table.clear()
        self._cpu_awaits = _NONE

    @property
    def awaits(self) -> bool:
        """True if the next operation of a stream, or of the CPU, has to wait."""
        return bool(self._awaited or self._cpu_awaits)

    def append(self, operations: Operations, stream: int) -> None:
        """Note the operation that is about to be appended, and what it waits for."""
        position = len(operations.operations)
        if self._cpu_awaits:
            operations.cpu_waits[position] = tuple(sorted(self._cpu_awaits))
            self._cpu_awaits = _NONE
        if awaited := self._awaited.pop(stream, None):
            operations.dependencies[position] = tuple(sorted(awaited))
        self.note_last(position, stream)

    def note_last(self, position: int, stream: int) -> None:
        """Note the last operation of a stream."""
        self._last[stream] = frozenset((position,))

    def wait_for(self, positions: Iterable[int], stream: int) -> None:
        """Let the next operation on a stream wait for operations."""
        self._awaited[stream] = self._awaited.get(stream, _NONE) | frozenset(positions)

    def wait_for_stream(self, other: int, stream: int) -> None:
        """Let the next operation on a stream wait for all that another stream was given."""
        self.wait_for(self._given(other), stream)

    def synchronize(self, kind: SyncKind, stream: int, event: int) -> None:
        """Note a synchronisation of streams (see ``Streams``)."""
        if kind == "record":
            self._recorded[event] = self._given(stream)
        elif kind == "wait":
            self.wait_for(self._recorded.get(event, _NONE), stream)
        elif event >= 0:
            self._cpu_awaits |= self._recorded.get(event, _NONE)
        else:
            chosen = self._last if stream < 0 else {stream: self._last.get(stream, _NONE)}
            self._cpu_awaits = self._cpu_awaits.union(*chosen.values())

    def _given(self, stream: int) -> frozenset[int]:
        """Return the last operation of a stream, and those that its next one waits for."""
        return self._last.get(stream, _NONE) | self._awaited.get(stream, _NONE)


@dataclass(frozen=True, slots=True)
class Recording:
    """Operations of a part of a step, to be written again.

    Attributes:
        operations: The operations.
        calls: Key and call of each.
        counts: What Python does between operations: each of ``_REPEATED``.
        repeats: Micro-batches or tokens that the part stands for.
    """

    operations: Sequence[Operation]
    calls: Sequence[tuple[Any, Call]]
    counts: tuple[dict[str, int], ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Captured:
    """What a CUDA graph launches: the module and the key and call of each operation."""

    operations: Sequence[tuple[str, Any, Call]]


Counted = Literal["sharded_calls", "resized_storages", "engine_modules", "engine_gradients"]
"""Counts in ``Operations`` that others add to: operators that Python calls with sharded tensors, storages that are
taken or freed without an operation, modules that DeepSpeed's engine makes ready, gradients that it takes over."""
_REPEATED = ("module_calls", "python_calls")
"""Counts in ``Operations`` that a repeated part of a step repeats."""
_QUICKER_FROM_CACHE = frozenset({"aten::native_group_norm"})
"""Operators whose price depends on whether their input is in the L2 cache (``operators.cost.group_norm``)."""


class OperationWriter:
    """Writer of ``operations`` while ``recording``.

    Args:
        storages: Location of tensors.
        modules: Tracker of the module at work.
        number_of: Returns the allocation behind a storage's key.
        event: Returns the number of events of the allocation trace so far.

    Attributes:
        operations: Operations of the step that is or was recorded.
        wanted: False if nobody needs the operations.
        recording: True during the step that is written.
        micro_step: Current micro-batch.
        repeats: Number of micro-batches that the current one stands for.
        stage: Current stage of the loop.
        generating: True during a further token of ``generate()``.
        whole: Name of the operation that the current ones are parts of.
        threads: Threads that run a module's Python at the same time, one for each GPU of the process.
        in_thread: True while one of them runs.
        wrapped: Times that ``count`` was called in the run.
        streams: Streams of the process.
    """

    streams: Streams

    def __init__(
        self,
        storages: Storages,
        modules: ModuleTracker,
        number_of: Callable[[int], int | None],
        event: Callable[[], int],
    ) -> None:
        self.operations = Operations()
        self.wanted = True
        self.recording = False
        self.micro_step = 0
        self.repeats = 1
        self.stage = "other"
        self.generating = False
        self.whole: str | None = None
        self.threads = 1
        self.in_thread = False
        self.wrapped = 0
        self._storages = storages
        self._modules = modules
        self._number_of = number_of
        self._event = event
        self._indices: dict[Any, int] = {}
        self._keys: list[Any] = []
        self._begun: list[tuple[bool, int, list[dict[str, int]]]] = []
        self._skips_placeholder = False
        self._order = OperationOrder()
        self._stage_work: tuple[Work, int] | None = None

    # -- control by the loop -------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Begin to write, as optimizer step ``step``."""
        if not self.wanted:
            return
        self.operations = Operations(step=step)
        self._indices.clear()
        self._keys.clear()
        self._order.clear()
        self.micro_step, self.repeats, self.recording = 0, 1, True
        self._modules.on_call = self._count_module_call

    def stop(self) -> None:
        """Stop writing."""
        self.recording = False
        self._modules.on_call = None

    def pause(self) -> None:
        """Leave out the operations that follow, until ``resume``."""
        self.recording = False
        self._modules.on_call = None

    def resume(self) -> None:
        """Write operations again, after those that were written before ``pause``."""
        if self.wanted:
            self.recording = True
            self._modules.on_call = self._count_module_call

    @property
    def awaits(self) -> bool:
        """True if the next operation of a stream or of the CPU waits for others, in a step that is written."""
        return self.recording and self._order.awaits

    def begin_recording(self, step: int) -> None:
        """Begin to record a part of a step, which may be one that is not written, or part of another one."""
        if self.wanted:
            apart = not self.recording
            if apart:
                self.start(step)
            self._begun.append((apart, len(self.operations.operations), [dict(one) for one in self._counted()]))

    def end_recording(self) -> Recording | None:
        """Return what was recorded, None if recording did not begin; empty if nobody needs the operations."""
        if not self.wanted:
            return Recording((), (), ())
        if not self._begun:
            return None
        apart, start, before = self._begun.pop()
        if apart:
            self.stop()
        found = self.operations.operations[start:]
        calls = [(self._keys[one.call], self.operations.calls[one.call]) for one in found]
        counts = tuple(
            {phase: more for phase, count in now.items() if (more := (count - earlier.get(phase, 0)) // self.repeats)}
            for earlier, now in zip(before, self._counted(), strict=True)
        )
        return Recording(found, calls, counts, self.repeats)

    def write_again(self, recording: Recording, events: int, outputs: Sequence[tuple[int, ...]]) -> None:
        """Write recorded operations as those of the current micro-batch, if the current step is written.

        Args:
            recording: The operations.
            events: Number of events of the allocation trace between them and their repetition.
            outputs: Allocations that hold the results of each.
        """
        if not self.recording:
            return
        written = self.operations.operations
        for one, (key, call), held in zip(recording.operations, recording.calls, outputs, strict=True):
            index = self._indices.get(key)
            if index is None:
                index = self._add_call(key, call)
            self._order.note_last(len(written), one.stream)
            repeats, generated = one.repeats // recording.repeats * self.repeats, one.generated or self.generating
            place = one.event + events, index, one.phase, one.module, self.micro_step
            written.append(Operation(*place, repeats, held, one.stream, generated=generated))
        for counted, counts in zip(self._counted(), recording.counts, strict=True):
            for phase, count in counts.items():
                counted[phase] = counted.get(phase, 0) + count * self.repeats

    def begin_capture(self) -> None:
        """Begin to write the operations of a CUDA graph, which are not launched now."""
        self._outside = self.operations, self._indices, self._keys, self._order, self.recording
        self.operations, self._indices, self._keys, self._order = Operations(), {}, [], OperationOrder()
        self.recording = self.wanted

    def end_capture(self) -> Captured:
        """Return the operations of the graph, and go on with those that are launched."""
        calls, keys = self.operations.calls, self._keys
        launched = (one for one in self.operations.operations if not calls[one.call].is_view)
        found = [(one.module, keys[one.call], calls[one.call]) for one in launched]
        self.operations, self._indices, self._keys, self._order, self.recording = self._outside
        return Captured(found)

    def launch(self, graph: Captured) -> None:
        """Write the launch of a CUDA graph and its operations, if the current step is written."""
        if not self.recording or not graph.operations:
            return
        self.count_call(GRAPH_LAUNCH)
        launched = Call(GRAPH_LAUNCH, (), (), numbers=(("nodes", str(len(graph.operations))),))
        event, stream, phase = self._event(), self.streams.executing.stream_id, self.phase()
        for place, (module, key, call) in enumerate((("", launched, launched), *graph.operations)):
            index = self._indices.get(key)
            index = self._add_call(key, call) if index is None else index
            self._order.append(self.operations, stream)
            at = event, index, phase, module, self.micro_step, self.repeats, (), stream
            self.operations.operations.append(Operation(*at, generated=self.generating, captured=place > 0))

    def skip_placeholder(self) -> None:
        """Leave out the next ``zeros``, which the Trainer takes for the loss of a micro-batch that was not executed."""
        self._skips_placeholder = True

    def stage_begin(self, work: Work) -> None:
        """Begin a part of a micro-batch in a stage of a pipeline."""
        self._stage_work = work, len(self.operations.operations)

    def stage_end(self) -> None:
        """End it."""
        if self.recording and self._stage_work is not None:
            self.operations.stage_runs.append(StageRun(*self._stage_work, len(self.operations.operations)))
        self._stage_work = None

    def phase(self) -> str:
        """Return the phase: forward, recompute, backward, optimizer, zero_grad or other."""
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if self._modules.recomputing else "backward"
        return self.stage

    def count(self, what: Counted) -> None:
        """Count something that takes the CPU time without being an operation."""
        self.wrapped += 1
        if self.recording:
            self._add(getattr(self.operations, what), 1)

    def count_call(self, name: str) -> None:
        """Count a call of a hook of saved tensors, by its class, or of what ``python_calls`` counts."""
        if self.recording:
            key, counts = f"{name}.{self.phase()}", self.operations.python_calls
            counts[key] = counts.get(key, 0) + self.repeats

    def _counted(self) -> list[dict[str, int]]:
        return [getattr(self.operations, name) for name in _REPEATED]

    def _add(self, counts: dict[str, int], more: int) -> None:
        phase = self.phase()
        counts[phase] = counts.get(phase, 0) + more * self.repeats

    def _count_module_call(self) -> None:
        self._add(self.operations.module_calls, 1)

    # -- operations ----------------------------------------------------------------------------------------------------

    def write(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        event: int,
        in_place: bool,
        *,
        rows: tuple[str, str] | None = None,
    ) -> None:
        """Write an operation that ran.  Call with torch functions disabled.

        Args:
            func: Operator overload.
            args: Positional arguments.
            kwargs: Keyword arguments.
            result: Its result.
            event: Number of events of the allocation trace before it.
            in_place: True if a GPU writes the result into the first argument.
            rows: What is known of the rows that it adds to, ``SAME_ROW`` or ``CHOSEN_ROWS``.
        """
        if self.whole or func.namespace == "profiler" or (self._skips_placeholder and self._is_placeholder(func)):
            return
        numbers = StorageNumbers(self._storages)
        positional = tuple([numbers.key(value) for value in args])
        named = tuple([(name, numbers.key(value)) for name, value in kwargs.items()]) if kwargs else ()
        before = len(numbers.storages)
        outputs = numbers.key(result)
        known = rows or self._cast_before(func, args)
        key = (func, positional, named, outputs, in_place, known)
        index = self._indices.get(key)
        if index is None:
            no_new = len(numbers.storages) == before
            call = call_of(func, args, kwargs, result, key[1:4], in_place, no_new)
            index = self._add_call(key, call._replace(numbers=(*call.numbers, known)) if known else call)
        self._append(index, event, outputs, numbers)

    def _cast_before(self, func: Any, args: tuple[Any, ...]) -> tuple[str, str] | None:
        """Return ``CAST_FROM`` of an operator whose time depends on it, if the kernel before has cast its input."""
        if func._schema.name not in _QUICKER_FROM_CACHE:
            return None
        calls, operations = self.operations.calls, self.operations.operations
        last = next((one for one in reversed(operations) if not calls[one.call].is_view), None)
        if last is None or self._number_of(args[0].untyped_storage()._cdata) not in last.outputs:
            return None
        call = calls[last.call]
        if call.name != "aten::_to_copy" or not call.inputs or call.inputs[0].dtype == call.outputs[0].dtype:
            return None
        return CAST_FROM, str(call.inputs[0].itemsize)

    def write_one(
        self,
        name: str,
        inputs: Any,
        outputs: Any,
        numbers: dict[str, Any],
        written: tuple[int, ...],
        event: int,
        stream: int | None = None,
    ) -> None:
        """Write an operation that Python simulates; see ``one_operation``."""
        if not self.recording:
            return
        with torch._C.DisableTorchFunction():
            storages = StorageNumbers(self._storages)
            input_key, output_key = storages.key(tuple(inputs)), storages.key(tuple(outputs))
            key = (name, input_key, output_key, tuple(numbers.items()), written)
            index = self._indices.get(key)
            if index is None:
                texts = tuple((key, text(value)) for key, value in numbers.items())
                call = Call(name, arrays(input_key), arrays(output_key), numbers=texts, written=written)
                index = self._add_call(key, call)
            self._append(index, event, output_key, storages, stream)

    def write_collective(
        self,
        name: str,
        inputs: Any,
        outputs: Any,
        numbers: dict[str, Any],
        event: int,
        stream: int | None,
        before: Sequence[int],
    ) -> int:
        """Write a collective and return its index.

        Args:
            name: Name of the operation.
            inputs: Tensors that are sent.
            outputs: Tensors that are received.
            numbers: Size of the message and of the group.
            event: Number of events of the allocation trace before it.
            stream: Stream of its group, on which it runs after what the current stream was given; None: the current
                stream itself.
            before: Operations that must be over before it starts.
        """
        current = self.streams.executing.stream_id
        runs_on = current if stream is None else stream
        self._order.wait_for(before, runs_on)
        if stream is not None:
            self._order.wait_for_stream(current, runs_on)
        self.write_one(name, inputs, outputs, numbers, (), event, stream=runs_on)
        return len(self.operations.operations) - 1

    def wait_for(self, position: int) -> None:
        """Let the next operation on the current stream wait for the operation of that index."""
        self._order.wait_for((position,), self.streams.executing.stream_id)

    def enter(self, name: str) -> int:
        """Let what runs until ``leave`` be parts of one operation; returns the number of events before it."""
        self.whole = name
        self._modules.custom_operation()
        return self._event()

    def leave(self) -> None:
        """End the operation that ``enter`` began."""
        self.whole = None

    def write_sync(self, kind: SyncKind, stream: int, event: int) -> None:
        """Note a synchronisation of streams for the dependencies between operations (see ``Streams``)."""
        if self.recording:
            self._order.synchronize(kind, stream, event)

    def result_moved_to_device(self) -> None:
        """Let the result of the last operation lie on the GPU: a copy of a tensor that stood for one on the host."""
        if not self.recording or self.whole or not self.operations.operations:
            return
        last = self.operations.operations[-1]
        call = self.operations.calls[last.call]
        if any(array.on_host for array in call.outputs):
            call = call._replace(outputs=tuple(array._replace(on_host=False) for array in call.outputs))
            index = self._indices.get(call)
            index = self._add_call(call, call) if index is None else index
            self.operations.operations[-1] = last._replace(call=index)

    def _append(
        self, index: int, event: int, output_key: Any, numbers: StorageNumbers, stream: int | None = None
    ) -> None:
        storages = list(numbers.storages)
        places = (output_key[3],) if type(output_key) is TensorKey else dict.fromkeys(storages_in(output_key))
        found = [self._number_of(storages[place]) for place in places]
        outputs = tuple([number for number in found if number is not None and number >= 0])
        stream = self.streams.executing.stream_id if stream is None else stream
        self._order.append(self.operations, stream)
        phase = self.phase()
        operation = Operation(
            event,
            index,
            phase,
            self._modules.current(),
            self.micro_step,
            self.repeats,
            outputs,
            stream,
            self.threads if self.in_thread or phase == "recompute" else 1,
            self.generating,
        )
        self.operations.operations.append(operation)

    def _add_call(self, key: Any, call: Call) -> int:
        index = self._indices[key] = len(self.operations.calls)
        self._keys.append(key)
        self.operations.calls.append(call)
        return index

    def _is_placeholder(self, func: Any) -> bool:
        self._skips_placeholder = False
        return bool(func._schema.name == "aten::zeros")
