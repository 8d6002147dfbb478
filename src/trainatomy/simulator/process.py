"""The world in which a step runs without a GPU: driver, function mode, recorder and module tracker, entered and left
together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainatomy.operators.allocation.meta import meta_kernels
from trainatomy.operators.allocation.plan import Processor, Rule
from trainatomy.operators.allocation.recurrent import flattening
from trainatomy.operators.allocation.whole import told_to
from trainatomy.results.trace import AllocationTrace, Event
from trainatomy.simulator.autocast import Autocast
from trainatomy.simulator.driver import Properties, simulated_driver
from trainatomy.simulator.functions import composites
from trainatomy.simulator.mode import CudaFunctions
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.placement import Handler, Placement
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.storages import Storages


@dataclass
class SimulatedProcess:
    """One simulated process with one GPU."""

    name: str
    total_memory: int
    processor: Processor
    rules: dict[str, Rule] = field(default_factory=dict)
    workspaces: Callable[[str, bool], list[tuple[int, str]]] = lambda name, backward: []

    def __post_init__(self) -> None:
        self.storages = Storages()
        self.modules = ModuleTracker(lambda begins: self.recorder.mark("recompute" if begins else "recompute end"))
        self.recorder = Recorder(self.storages, self.modules, self.rules, self.processor, self.workspaces)
        copied = lambda t: self.recorder.label(t, "weight_copy")  # noqa: E731
        self.autocast = Autocast(self.storages, self.processor.torch_version, copied)
        self.placement = Placement(self.storages, self._arrive, self.on_host, self._known)
        self.functions = CudaFunctions(self._handlers(), composites(self.processor), self.autocast)

    @property
    def trace(self) -> AllocationTrace:
        """What was allocated so far."""
        return self.recorder.trace

    def _told(self, functions: Iterable[Any], flag: str) -> dict[Any, Handler]:
        """Handlers that set a flag of the recorder while one of ``functions`` runs."""

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = getattr(self.recorder, flag)
            setattr(self.recorder, flag, True)
            try:
                return func(*args, **kwargs)
            finally:
                setattr(self.recorder, flag, before)

        return dict.fromkeys(functions, run)

    def _handlers(self) -> dict[Any, Handler]:
        """Devices; additions that Python makes, which are not the autograd engine's; numbers that are assigned, which
        CUDA keeps on the host."""
        t = torch.Tensor
        return {
            **self.placement.handlers(),
            **self._told((torch.add, t.add, t.__add__, t.__radd__), "python_adds"),
            **self._told((t.__setitem__,), "scalars_on_host"),
            torch.ctc_loss: self._ctc_loss,
        }

    def _ctc_loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """CUDA's loss takes its lengths as numbers on the host (aten/src/ATen/native/LossCTC.cpp, ``ctc_loss``); where
        the batch does not tell them, each sample is as long as there is room for."""
        probabilities, targets, inputs, outputs = args[:4]
        with torch._C.DisableTorchFunction():
            inputs, outputs = self._numbers(inputs, probabilities.shape[0]), self._numbers(outputs, targets.shape[-1])
        args = (probabilities, targets, inputs, outputs, *args[4:])
        if self.autocast.enabled:
            args, kwargs = self.autocast.cast(func, args, kwargs)
        return func(*args, **kwargs)

    def _numbers(self, given: Any, most: int) -> Any:
        """The values of a tensor of lengths as a list."""
        if not isinstance(given, torch.Tensor):
            return given
        if not given.is_meta:
            return given.tolist()
        known = self.recorder.values.of(given)
        return [most] * given.numel() if known is None else known.tolist()

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        with torch._C.DisableTorchFunction():
            return self.recorder.values.of(tensor) if tensor.layout == torch.strided else None

    def _arrive(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """A tensor came over from the host, perhaps with values: the recorder did not see it as the device's."""
        with torch._C.DisableTorchFunction():
            self.storages.forget(tensor)
            self.recorder.hold(tensor, "copy to device")
            self.recorder.operations.arrived()
            if value is not None:
                self.recorder.values.learn(tensor, value)
        if self.recorder.stage != "load":
            self.recorder.label(tensor, "input")

    @contextlib.contextmanager
    def open(self) -> Iterator[SimulatedProcess]:
        """Everything inside runs in this world."""
        properties = Properties(self.name, self.total_memory, self.processor)
        empty = lambda: self.recorder.trace.events.append(Event("empty_cache", -1, 0))  # noqa: E731
        operations = told_to(self.recorder.operations)
        with simulated_driver(properties, empty, self.autocast.clear), operations, flattening(), meta_kernels():  # noqa: SIM117
            with self.modules, self.recorder, self.functions:
                yield self

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Meta tensors made inside stand for tensors in host memory: a model that is built before it is moved."""
        before, self.recorder.stage = self.recorder.stage, "host"
        try:
            with torch.device("meta"):
                yield
        finally:
            self.recorder.stage = before

    def adopt(self, model: nn.Module) -> None:
        """Take a model on meta tensors that was built elsewhere: it lies on the host."""
        with torch._C.DisableTorchFunction():
            self.storages.mark_host([*model.parameters(), *model.buffers()])
            for name, buffer in model.named_buffers():
                if name.endswith("num_batches_tracked"):  # a mean over all batches divides by it
                    self.recorder.values.learn(buffer, torch.zeros(buffer.shape, dtype=buffer.dtype))
        self.modules.learn(model)
