"""Writes the operations of the last executed step: distinct calls once, with their shapes, strides and FLOP, and every
operation in the order of issue.

The recorder hands over each aten operation after it ran.  Where PyTorch acts otherwise under a dispatch mode than on a
GPU (gradients that the engine accumulates, zeros that are filled in place), the operation is written as the GPU's;
where a kernel is simulated by smaller operations, ``kernels.whole.one_operation`` writes it whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainatomy.results.operations import Call, Operation, Operations
from trainatomy.simulator.calls import Places, Seen, arrays, described, storages_of, text
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.storages import Storages


class OperationWriter:
    """Writes ``operations`` while ``recording``, if they are ``wanted``. ``number_of`` gives the allocation that a
    storage's key stands for."""

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
        self._storages = storages
        self._modules = modules
        self._number_of = number_of
        self._event = event
        self._indices: dict[Any, int] = {}
        self.whole: str | None = None
        self._skips = False

    # -- what the loop tells -------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """What follows is the step that is written."""
        if not self.wanted:
            return
        self.operations = Operations(step=step)
        self._indices.clear()
        self.micro_step, self.repeats, self.recording = 0, 1, True
        self._modules.count = self._called

    def stop(self) -> None:
        """The step is over."""
        self.recording = False
        self._modules.count = None

    def skip_placeholder(self) -> None:
        """A micro-batch is left out; the zero that the Trainer takes for its loss is no operation of the step."""
        self._skips = True

    def phase(self) -> str:
        """forward, recompute, backward, optimizer, zero_grad or other."""
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if self._modules.recomputing else "backward"
        return self.stage

    def _called(self) -> None:
        calls, phase = self.operations.module_calls, self.phase()
        calls[phase] = calls.get(phase, 0) + self.repeats

    # -- operations ----------------------------------------------------------------------------------------------------

    def write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, event: int, in_place: bool
    ) -> None:
        """An operation ran, ``event`` events of the tape before it. ``in_place``: on a GPU its result is its first
        argument. Call with torch functions disabled."""
        if self.whole or func.namespace == "profiler" or (self._skips and self._is_placeholder(func)):
            return
        places = Places()
        given = tuple([self._seen(value, places) for value in args])
        named = tuple([(name, self._seen(value, places)) for name, value in kwargs.items()]) if kwargs else ()
        before = len(places.storages)
        made = self._seen(result, places)
        key = (func, given, named, made, in_place)
        index = self._indices.get(key)
        if index is None:
            no_new = len(places.storages) == before
            index = self._intern(key, described(func, args, kwargs, result, key[1:4], in_place, no_new))
        self._append(index, event, made, places)

    def write_one(
        self, name: str, inputs: Any, outputs: Any, numbers: dict[str, Any], written: tuple[int, ...], event: int
    ) -> None:
        """An operation that Python simulates: see ``one_operation``."""
        if not self.recording:
            return
        with torch._C.DisableTorchFunction():
            places = Places()
            given, made = self._seen(tuple(inputs), places), self._seen(tuple(outputs), places)
            key = (name, given, made, tuple(numbers.items()), written)
            index = self._indices.get(key)
            if index is None:
                texts = tuple((key, text(value)) for key, value in numbers.items())
                call = Call(name, arrays(given), arrays(made), numbers=texts, written=written)
                index = self._intern(key, call)
            self._append(index, event, made, places)

    def enter(self, name: str) -> int:
        """What follows, until ``leave``, is part of one operation. Gives the number of events before it."""
        self.whole = name
        self._modules.custom_operation()
        return self._event()

    def leave(self) -> None:
        """The operation that ``enter`` began is over."""
        self.whole = None

    def arrived(self) -> None:
        """The last operation's result lies on the device: a copy of what stood for the host's."""
        if not self.recording or self.whole or not self.operations.operations:
            return
        last = self.operations.operations[-1]
        call = self.operations.calls[last.call]
        if any(array.on_host for array in call.outputs):
            call = call._replace(outputs=tuple(array._replace(on_host=False) for array in call.outputs))
            index = self._indices.get(call)
            index = self._intern(call, call) if index is None else index
            self.operations.operations[-1] = last._replace(call=index)

    def _append(self, index: int, event: int, made: Any, places: Places) -> None:
        keys = list(places.storages)
        numbers = [self._number_of(keys[place]) for place in dict.fromkeys(storages_of(made))]
        outputs = tuple([number for number in numbers if number is not None and number >= 0])
        operation = Operation(
            event, index, self.phase(), self._modules.current(), self.micro_step, self.repeats, outputs
        )
        self.operations.operations.append(operation)

    def _intern(self, key: Any, call: Call) -> int:
        index = self._indices[key] = len(self.operations.calls)
        self.operations.calls.append(call)
        return index

    def _seen(self, value: Any, places: Places) -> Any:
        """A value as a part of the key: tensors as ``Seen`` (sparse ones by their values), lists as tuples."""
        if isinstance(value, torch.Tensor):
            value = value._values() if value.layout == torch.sparse_coo else value
            storage = value.untyped_storage()._cdata
            place = places.storages.setdefault(storage, len(places.storages))
            part = places.parts.setdefault((storage, int(value.storage_offset())), len(places.parts))
            on_host = storage in self._storages._host if value.is_meta else True
            return Seen((value.shape, value.stride(), value.dtype, place, on_host, part))
        if isinstance(value, (list, tuple)):
            return tuple([self._seen(item, places) for item in value])
        return None if isinstance(value, torch.Generator) else value

    def _is_placeholder(self, func: Any) -> bool:
        self._skips = False
        return bool(func._schema.name == "aten::zeros")
