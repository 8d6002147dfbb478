"""Sees every aten operation below autograd and writes to the tape what it allocates on the device, and when that is
given back."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Processor, Rule, Scratch
from trainatomy.operators.registry import libraries_of
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator.answers import Answers, assumed
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.operations import OperationWriter
from trainatomy.simulator.selection import Selection
from trainatomy.simulator.storages import Storages
from trainatomy.simulator.uses import UseCounts, is_dense
from trainatomy.simulator.values import Values
from trainatomy.simulator.zeros import FreshZeros

_DISABLED = torch._C.DisableTorchFunction
_FILLS = frozenset({"aten::masked_fill", "aten::masked_fill_"})


class Recorder(TorchDispatchMode):
    """Writes the tape, and answers where the value of a tensor is asked for."""

    def __init__(
        self,
        storages: Storages,
        modules: ModuleTracker,
        rules: dict[str, Rule],
        processor: Processor,
        workspaces: Callable[[str, bool], list[tuple[int, str]]],
    ) -> None:
        super().__init__()
        self.trace = AllocationTrace()
        self.step = -1
        self.stage = "load"
        self.python_adds = False
        self.scalars_on_host = False
        self._storages = storages
        self._modules = modules
        self._rules = rules
        self.values = Values()
        self._answers = Answers(self.values)
        self._processor = processor
        self._workspaces = workspaces
        self.libraries: set[str] = set()
        self._choices = defaultdict[Hashable, int](count().__next__)  # each thread decides for itself
        self._uses = UseCounts()
        self._zeros = FreshZeros()
        self._selection = Selection(self.values, self.hold)
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._taken_over = False
        self.operations = OperationWriter(storages, modules, self._number_at, lambda: len(self.trace.events))

    # -- the tape ------------------------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Note that something began or ended here."""
        self.trace.marks.append(Mark(len(self.trace.events), name, self.step))

    def allocate(self, size: int, operation: str) -> int:
        """A request of ``size`` bytes; gives its number on the tape, -1 for an empty one (PyTorch takes nothing for
        it)."""
        if size == 0:
            return -1
        number = len(self.trace.origins)
        operation = self.operations.whole or operation
        self.trace.origins.append(Origin(operation, self._modules.current(), self.phase, self.step))
        self.trace.events.append(Event("alloc", number, size))
        return number

    def release(self, number: int) -> None:
        """The allocation of that number is given back."""
        if number >= 0:
            self.trace.events.append(Event("free", number, 0))

    @property
    def phase(self) -> str:
        """What is going on: recompute and backward are seen from autograd's state, the rest is told."""
        if torch._C._current_graph_task_id() != -1:
            return "recompute" if self._modules.recomputing else "backward"
        return self.stage

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The allocation that holds a tensor, of a sparse one its values, if it is on the device."""
        with _DISABLED():
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor
            known = self._known.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        return known[0] if known else None

    def _number_at(self, storage: int) -> int | None:
        known = self._known.get(storage)
        return known[0] if known else None

    def hold(self, tensor: torch.Tensor, operation: str, size: int | None = None) -> int | None:
        """A tensor has come to life on the device; its storage's death will release it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return None
        number = self.allocate(storage.nbytes() if size is None else size, operation)
        self._adopt(tensor, number)
        return number

    def _adopt(self, tensor: torch.Tensor, number: int) -> None:
        """An allocation belongs to a tensor's storage from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def died(_: object, key: int = key, number: int = number) -> None:
            if self._known.get(key, (None,))[0] == number:
                del self._known[key]
                self.release(number)

        self._known[key] = (number, weakref.ref(storage, died))

    def label(self, tensor: torch.Tensor, label: str) -> None:
        """Say what the allocation behind a tensor holds."""
        number = self.number_of(tensor)
        if number is not None and number >= 0:
            self.trace.labels.setdefault(number, label)

    # -- operations ----------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled; the wrapper that keeps dynamo out costs time in every operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _DISABLED():
            name = func._schema.name
            event, self._taken_over = len(self.trace.events), False
            result = self._answers.answer(name, args)
            if result is None:
                result = self._selection.run(name, func, args, kwargs)
            if result is None:
                result = self._run(name, func, args, kwargs)
            self._modules.operation()
            outputs = _tensors(result)
            if outputs:
                self._answers.learn(name, args, outputs)
                self.values.follow(func, args, kwargs, outputs)
                if self._from_host(name, args, outputs):
                    self._storages.mark_host(outputs)
                elif not (name == "aten::add" and self._accumulates(args, outputs[0])):
                    self._zeros.follow(name, args, outputs[0], self._take_over)
                    self._write(name, func, args, kwargs, outputs)
                    self._use_libraries(name)
            if self.operations.recording:
                self.operations.write(func, args, kwargs, result, event, self._taken_over)
        return result

    def _run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation on tensors without data.  A number in the host's memory may fill a tensor of the device: CUDA
        reads it (aten/src/ATen/native/cuda/IndexKernel.cpp, ``masked_fill__cuda``), what stands for its tensors asks
        for the same place."""
        if name in _FILLS and isinstance(args[2], torch.Tensor) and not args[2].is_meta:
            func, args = func._overloadpacket.Scalar, (*args[:2], args[2].item())
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if name == "aten::_to_copy" and _goes_to_host(kwargs):
                told = self._told(args[0], kwargs.get("dtype"))
                if told is not None:
                    return told
            raise SimulationError(
                f"{name} in {self._modules.current() or 'the training loop'} cannot be executed without data: "
                "its result depends on values that do not exist in a run without a GPU.\n"
                "Measure this model with `trainatomy measure`, or replace the operation "
                f"(PyTorch says: {str(error).splitlines()[0][:200]})"
            ) from error

    def _told(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
        """What the host reads of a tensor of the device: its values where they are known, else what is assumed."""
        known = self.values.of(tensor)
        return assumed(tensor, dtype) if known is None else known.to(dtype or known.dtype, copy=True)

    def _use_libraries(self, name: str) -> None:
        """Libraries take their workspaces between a call's output and its kernel, once for each thread."""
        in_backward = torch._C._current_graph_task_id() != -1
        self.libraries.update(libraries_of(name, in_backward))
        for size, what in self._workspaces(name, in_backward):
            number = self.allocate(size, what)
            self.trace.labels[number] = what

    def _accumulates(self, args: tuple[Any, ...], output: torch.Tensor) -> bool:
        """The engine adds two gradients of one tensor in place if nobody else holds the first; under a dispatch mode it
        never does.

        Source: torch/csrc/autograd/input_buffer.cpp (``accumulate``, ``can_accumulate_inplace``), torch 2.9-2.13.
        ``python_adds`` is set while an addition comes from Python, which is not the engine's.
        """
        if torch._C._current_graph_task_id() == -1 or self.python_adds or torch.is_grad_enabled():
            return False
        first = args[0]
        if (
            len(args) != 2
            or not isinstance(args[1], torch.Tensor)
            or first.shape != output.shape
            or first.dtype != output.dtype
        ):
            return False
        if not is_dense(first) or not self._uses.exclusive(first):
            return False
        return self._take_over(first, output)

    def _take_over(self, source: torch.Tensor, output: torch.Tensor) -> bool:
        """The memory of ``source`` is the output's from now on, as CUDA writes in place what a dispatch mode does
        not."""
        known = self._known.pop(source.untyped_storage()._cdata, None)
        if known is None:
            return False
        self._adopt(output, known[0])
        self._taken_over = True
        return True

    def _from_host(self, name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> bool:
        """Results of meta tensors that all stand for the host's stay there."""
        if self.stage == "host" or (self.scalars_on_host and name == "aten::scalar_tensor"):
            return True
        if not self._storages._host:
            return False
        sources = [t for t in _tensors(args) if t.is_meta]
        return bool(sources) and not any(self._storages.on_device(t) for t in sources)

    def _write(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
    ) -> None:
        rule = self._rules.get(name)
        if rule is None:
            for tensor in outputs:
                self.hold(tensor, name)
            return
        scratch: list[tuple[str, int]] = []
        for item in rule(KernelCall(func, args, kwargs, tuple(outputs), self._processor)):
            if isinstance(item, Scratch):
                scratch.append((item.name, number := self.allocate(item.bytes, f"{name} ({item.name})")))
                if item.choice is not None:
                    self.trace.choices[number] = self._choices[item.choice, torch._C._current_graph_task_id() != -1]
            elif isinstance(item, Out):
                if item.number < len(outputs):
                    self.hold(outputs[item.number], name, item.bytes)
            elif isinstance(item, Free):
                found = next(i for i, (key, _) in enumerate(scratch) if key == item.name)
                self.release(scratch.pop(found)[1])
        for tensor in outputs:
            self.hold(tensor, name)
        for _, number in reversed(scratch):
            self.release(number)


def _goes_to_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and device.type == "cpu"


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors without data that have a storage of their own; a sparse one is made of tensors that were seen already."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_meta and value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []
