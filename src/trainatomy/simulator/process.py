"""Simulated process: the parts of a run without a GPU, entered and left together."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.operators.allocation.above_autograd import record_operations_with
from trainatomy.operators.allocation.meta import meta_kernels
from trainatomy.operators.allocation.plan import Processor, Rule
from trainatomy.operators.allocation.recurrent import flattening
from trainatomy.operators.allocation.workspaces import TakenWorkspaces, Workspace
from trainatomy.results.trace import AllocationTrace, Event
from trainatomy.simulator import sparse_tensors
from trainatomy.simulator.autocast import Autocast
from trainatomy.simulator.autograd import (
    BackwardOrder,
    Handler,
    addresses,
    blocking_copies,
    checkpoint_inputs,
    hooks_in_mode,
)
from trainatomy.simulator.cards import Card, Cards
from trainatomy.simulator.device import DeviceProperties, MemoryCounters
from trainatomy.simulator.driver import CurrentDevice, Hooks, install_driver
from trainatomy.simulator.experts import grouped_mm_fallback
from trainatomy.simulator.flex.attention import Tuning
from trainatomy.simulator.flex.calls import FlexCalls
from trainatomy.simulator.functions import CudaFunctions, composites
from trainatomy.simulator.isolation import patched
from trainatomy.simulator.modules import ModuleTracker, count_calls
from trainatomy.simulator.parallel import data_parallel
from trainatomy.simulator.parallel.data_parallel import ReplicaPlacement, ReplicaRecorder
from trainatomy.simulator.parallel.group import Topology, process_group
from trainatomy.simulator.parallel.recorder import RankRecorder
from trainatomy.simulator.placement import Placement
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.releases import install_legacy_types
from trainatomy.simulator.steps import BEGIN as SCALED_STEP
from trainatomy.simulator.steps import END as SCALED_STEP_END
from trainatomy.simulator.storages import Storages
from trainatomy.training.quantization import scales
from trainatomy.training.run import following_scaled_steps
from trainatomy.training.stored_weights import numbers

_FEW = 1024
"""Numbers of a tensor such as a metric of each sample."""

SizeOnGPUs = Callable[[Callable[[Processor], int]], int]


class _NoWorkspaces:
    """A process whose libraries take no workspaces."""

    def __call__(self, call_name: str, in_backward: bool, stream: int = 0) -> list[Workspace]:
        return []

    def clear(self) -> None:
        """There are none."""


_REJECTION_ROUNDS = 3
"""Rounds of ``trunc_normal_``'s rejection sampling that are executed; more allocate nothing new."""


@dataclass
class SimulatedProcess:
    """A simulated process with one GPU, or with several of which one is recorded.

    Attributes:
        name: Name of the GPU, as ``torch.cuda.get_device_name`` returns it.
        total_memory: Its memory in bytes.
        processor: Properties that the choice of kernels depends on.
        rules: Allocation rules by operator.
        workspaces: Makes the function that returns the workspaces that an operation makes its libraries take (see
            ``WorkspaceTracker``).
        topology: Place of the process in a training on several GPUs.
        notes: Sentences for the reader about what happened in the process.
        misses_a_mask: Whether attention stored all its scores, and would not have done so beside a mask.
        allocator: Returns the settings of the process's allocator, for what it says of its memory.
        others: Other GPUs that the execution is to serve.
        cards: The GPU, and those of the others that the execution serves so far.
    """

    name: str
    total_memory: int
    processor: Processor
    rules: dict[str, Rule] = field(default_factory=dict)
    workspaces: Callable[[Processor, SizeOnGPUs], TakenWorkspaces] = lambda processor, size: _NoWorkspaces()
    topology: Topology = field(default_factory=Topology)
    notes: list[str] = field(default_factory=list)
    allocator: Callable[[], AllocatorSettings] = AllocatorSettings
    others: Mapping[Card, Processor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.misses_a_mask = False
        plain = self.processor
        own = Card(self.name, self.total_memory, plain.capability, plain.multiprocessors, plain.l2_bytes)
        self.cards = Cards(own, self.processor, dict(self.others))
        self.processor = self.cards.processor
        self.current = CurrentDevice(self.topology)
        self.tuning = Tuning(lambda: self.processor.l2_bytes)
        self.storages = Storages()
        self.modules = ModuleTracker(lambda begins: self.recorder.mark("recompute" if begins else "recompute end"))
        workspaces = self.workspaces(plain, self.cards.size)
        parts = (self.storages, self.modules, self.rules, self.cards, workspaces, self.current.device)
        self.recorder = self._recorder(parts)
        trace = self.recorder.trace
        trace.output_layers, trace.around_output_layers = self.modules.output_layers, self.modules.around_output_layers
        self.counters = MemoryCounters(self.recorder.trace, self.allocator, self.cards)
        self.autocast = Autocast(
            self.storages,
            self.processor.torch_version,
            lambda copy: self.recorder.label(copy, "weight_copy"),
            self.recorder.weight_copies,
        )
        self.placement = self._placement(
            self.current, self.storages, self._arrived, self.on_host, self._known, self._wait
        )
        self.functions = CudaFunctions(self.placement, self._handlers(), self._composites(), self.autocast)

    def _recorder(self, parts: tuple[Any, ...]) -> Recorder:
        """Return the recorder: for one of several processes, one that knows collectives and sharded tensors."""
        if self.topology.devices > 1:
            return ReplicaRecorder(*parts, topology=self.topology, current=self.current)
        if not self.topology.has_group:
            return Recorder(*parts)
        return RankRecorder(*parts, topology=self.topology)

    def _placement(self, *parts: Any) -> Placement:
        """Return the placement: for a process with several GPUs, one that tells them apart."""
        if self.topology.devices == 1:
            return Placement(*parts)
        recorder: Any = self.recorder
        return ReplicaPlacement(*parts, recorder=recorder)

    @property
    def trace(self) -> AllocationTrace:
        """Allocations so far."""
        return self.recorder.trace

    def open(self) -> contextlib.AbstractContextManager[SimulatedProcess]:
        """Run the block in this process; all patches are undone after it, also after an exception or Ctrl-C."""
        return patched(self._enter, self)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        properties = DeviceProperties(self.cards)
        hooks = Hooks(
            empty_cache=lambda: self.recorder.trace.events.append(Event("empty_cache", -1, 0)),
            clear_autocast_cache=self.autocast.clear,
            record_stream=self.recorder.use_on_stream,
            to_device=lambda tensor: self.placement.move(tensor, self.current.device),
            counters=self.counters.functions(),
        )
        stack.enter_context(mock.patch.dict(os.environ, self.topology.environment()))
        install_driver(stack, properties, self.current, self.recorder.streams, hooks)
        install_legacy_types(stack, self.current)
        stack.enter_context(mock.patch.object(nn.init, "_no_grad_trunc_normal_", self._trunc_normal()))
        self._skip_counting_flop(stack)
        stack.enter_context(record_operations_with(self.recorder.operations))
        stack.enter_context(flattening())
        stack.enter_context(meta_kernels())
        stack.enter_context(FlexCalls(self).installed())
        if self.topology.has_group:
            self._enter_group(stack)
        if self.topology.devices > 1:
            placement: Any = self.placement
            data_parallel.install(stack, placement, self.modules)
        stack.enter_context(following_scaled_steps(self._scaled_step))
        BackwardOrder().install(stack)
        addresses(stack)
        checkpoint_inputs(stack, self.processor.torch_version)
        blocking_copies(stack, self.processor.torch_version, self.recorder.streams)
        recorder = self.recorder
        self.count_calls_of = count_calls(stack, recorder.operations.count_call)
        hooks_in_mode(stack, self.functions, self.storages.host_memory, recorder.streams, recorder.operations)
        stack.enter_context(self.modules)
        stack.enter_context(self.recorder)
        stack.enter_context(self.functions)

    @contextlib.contextmanager
    def _scaled_step(self) -> Iterator[None]:
        """Mark the step of an optimizer that gradient scaling may skip."""
        self.recorder.mark(SCALED_STEP)
        yield
        self.recorder.mark(SCALED_STEP_END)

    @staticmethod
    def _patches() -> Any:
        """Return the module that patches PyTorch for one rank of several; to import it takes a third of a second."""
        from trainatomy.simulator.parallel import patches

        return patches

    def _enter_group(self, stack: contextlib.ExitStack) -> None:
        """Make the process one of several."""
        assert isinstance(self.recorder, RankRecorder)
        self._patches().install(stack, self.recorder, self.processor.torch_version)
        stack.enter_context(process_group(self.topology))

    @staticmethod
    def _skip_counting_flop(stack: contextlib.ExitStack) -> None:
        """Let the Trainer's total of FLOP stay 0: it walks all parameters in each micro-batch for this log entry."""
        trainer: Any = sys.modules.get("transformers.trainer")
        if trainer is not None:
            stack.enter_context(mock.patch.object(trainer.Trainer, "floating_point_ops", lambda trainer, inputs: 0))

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Let meta tensors that are made inside stand for tensors in host memory: a model before it is moved."""
        self.storages.host_memory.look()
        before, self.recorder.stage = self.recorder.stage, "host"
        try:
            with torch.device("meta"):
                yield
        finally:
            self.recorder.stage = before

    @contextlib.contextmanager
    def without_gpu(self) -> Iterator[None]:
        """Run the block as on a machine without a GPU, such as the import of a library that looks for CUDA's files."""
        missing = mock.Mock(return_value=False)
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            mock.patch.object(torch.cuda, "is_available", missing),
            mock.patch.object(torch.accelerator, "is_available", missing),
        ):
            yield

    def use_functions(self, functions: dict[Any, Callable[..., Any]]) -> None:
        """Run ``functions`` in place of those that Python calls, until the process ends."""
        self.functions.replace(functions)

    def adopt(self, model: nn.Module) -> None:
        """Take a model on meta tensors that was built elsewhere: it lies in host memory."""
        with torch._C.DisableTorchFunction():
            if self.topology.has_group:
                for twin, tensor in self._patches().without_data(model):
                    self.recorder.values.learn(twin, tensor.detach())
            weights = [*map(numbers, model.parameters()), *model.buffers(), *scales(model)]
            self.storages.mark_host(weights, takes_memory=False)  # they stand for the files that are loaded, too
            for name, buffer in model.named_buffers():
                if name.endswith("num_batches_tracked"):  # a mean over all batches divides by it
                    self.recorder.values.learn(buffer, torch.zeros(buffer.shape, dtype=buffer.dtype))
        self.modules.learn(model)

    # -- handlers ------------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[Any, Handler]:
        """Return the functions that the function mode handles itself.

        That is devices, additions in Python (which are not the autograd engine's), numbers that are assigned (CUDA
        keeps them on the host), and functions that read lengths on the host.
        """
        t = torch.Tensor
        return {
            **self._placement_handlers(),
            **self._flagged((torch.add, t.add, t.__add__, t.__radd__), "python_adds"),
            **self._flagged((t.__setitem__,), "scalars_on_host"),
            torch.ctc_loss: self._ctc_loss,
            torch.istft: self._istft,
            t.istft: self._istft,
            torch.isfinite: self._is_finite,
            torch.isnan: self._is_nan,
            t.new: self._new,
        }

    def _placement_handlers(self) -> dict[Any, Handler]:
        found = self.placement.handlers()
        if self.topology.has_group:
            found.update(self._patches().handlers(found, self.placement.keep_on_host))
        return found

    def _composites(self) -> dict[Any, Callable[..., Any]]:
        return {**composites(self.cards, self._attention_misses_a_mask), **grouped_mm_fallback()}

    def _attention_misses_a_mask(self) -> None:
        self.misses_a_mask = True

    def _flagged(self, functions: Iterable[Any], flag: str) -> dict[Any, Handler]:
        """Return handlers that set a flag of the recorder while one of ``functions`` runs."""

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = getattr(self.recorder, flag)
            setattr(self.recorder, flag, True)
            try:
                return func(*args, **kwargs)
            finally:
                setattr(self.recorder, flag, before)

        return dict.fromkeys(functions, run)

    def _is_finite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Let a number that nobody knows be finite, as it is in a healthy training."""
        result: torch.Tensor = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if result.is_meta and result.numel() == 1:
                self.recorder.values.learn(result, torch.ones(result.shape, dtype=torch.bool))
        return result

    def _is_nan(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Let no number be NaN in a tensor of a few, whose numbers may be chosen by it: ``x[~torch.isnan(x)]``."""
        result: torch.Tensor = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if result.is_meta and result.numel() <= _FEW and self.recorder.values.of(result) is None:
                with torch._C._DisableTorchDispatch():  # the training does not make these zeros
                    zeros = torch.zeros(result.shape, dtype=torch.bool, device="cpu")
                self.recorder.values.learn(result, zeros)
        return result

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``tensor.new`` with sizes or with data, which are on the host where the tensor is."""
        like, *given = args
        of_tensor = bool(given) and isinstance(given[0], torch.Tensor)
        if kwargs or of_tensor or not like.is_meta or self.placement.is_device(like):
            return sparse_tensors.new(func, args, kwargs)
        sizes: Any = given[0] if given and isinstance(given[0], torch.Size) else given or [0]
        if isinstance(sizes[0], list | tuple):
            return torch.tensor(sizes[0], dtype=like.dtype, device="cpu")
        return like.new_empty(sizes)

    def _ctc_loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the lengths of samples as numbers on the host, as CUDA's loss reads them.

        Where the batch does not say, each sample has the maximum length.  Source: aten/src/ATen/native/LossCTC.cpp
        (``ctc_loss``).
        """
        probabilities, targets, inputs, outputs = args[:4]
        with torch._C.DisableTorchFunction():
            inputs, outputs = self._lengths(inputs, probabilities.shape[0]), self._lengths(outputs, targets.shape[-1])
        too_long = (both for both in zip(outputs, inputs, strict=False) if both[0] > both[1])
        self.recorder.too_long_transcript = next(too_long, self.recorder.too_long_transcript)
        args = (probabilities, targets, inputs, outputs, *args[4:])
        if self.autocast.enabled:
            args, kwargs = self.autocast.cast(func, args, kwargs)
        return func(*args, **kwargs)

    def _istft(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the windows overlap everywhere; PyTorch refuses others by the values of the window."""
        with self.recorder.scalar_reads.true_at_most(0):
            return func(*args, **kwargs)

    def _lengths(self, lengths: Any, maximum: int) -> Any:
        """Return a tensor of lengths as a list."""
        if not isinstance(lengths, torch.Tensor):
            return lengths
        if not lengths.is_meta:
            return lengths.flatten().tolist()
        known = self.recorder.values.of(lengths)
        return [maximum] * lengths.numel() if known is None else known.flatten().tolist()

    def _trunc_normal(self) -> Callable[..., torch.Tensor]:
        """Return ``trunc_normal_`` with an end: it draws again until all values are within the bounds."""
        original = nn.init._no_grad_trunc_normal_

        def trunc_normal(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self.recorder.scalar_reads.true_at_most(_REJECTION_ROUNDS):
                return original(*args, **kwargs)

        return trunc_normal

    # -- callbacks -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        self.recorder.streams.executing.synchronize()

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        with torch._C.DisableTorchFunction():
            return self.recorder.values.of(tensor) if tensor.layout == torch.strided else None

    def _arrived(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Hold a tensor that was copied to the GPU, perhaps with known values."""
        with torch._C.DisableTorchFunction():
            self.storages.mark_device(tensor)
            self.recorder.hold(tensor, "copy to device")
            self.recorder.operations.result_moved_to_device()
            if value is not None:
                self.recorder.values.learn(tensor, value)
        if self.recorder.phase not in ("load", "backward", "recompute"):  # activations come back in backward
            self.recorder.label(tensor, "input")
