"""Record where each part of a training loop begins in the stream of allocations, and the addresses of known tensors.

The notes become the marks and labels of the run's allocation trace (``traces/trace.py``).  A note's position among the
allocations is exact, because it is the allocator's own count of allocations and releases.

Record which module runs on the GPU, by global forward hooks.

Time the tokens of ``generate()``, which waits for the GPU after each token by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from trainatomy.measurement.process.job import WARM_UP_STEPS
from trainatomy.measurement.traces.history import AROUND_OUTPUT_LAYER, BUCKETS, COMMUNICATION, OUTPUT_LAYER, Note
from trainatomy.results.tasks import RestoringPurpose
from trainatomy.training.checkpointing import Recomputation
from trainatomy.training.model import around, output_layers
from trainatomy.training.observer import Observer
from trainatomy.training.optimizer import tensors_in
from trainatomy.training.parallel.deepspeed import engine_tensors, part_of
from trainatomy.training.quantization import scales
from trainatomy.training.stored_weights import numbers

WeightCopies = tuple[tuple[int, int], ...]
"""Pairs of a weight's id and the bytes of its 16-bit copy."""


class ModuleTracker:
    """Report the beginning and end of each module's forward, and of each recomputation in the backward pass.

    The hooks are global, as in a simulated run: a module's own hooks would change what some modules do
    (``nn.TransformerEncoderLayer`` leaves its fast path).
    """

    def __init__(self, model: nn.Module, report: Callable[..., None]) -> None:
        """Track the modules of ``model``; call ``report(name, addresses, module, copies)`` for each event."""
        self._report = report
        self._model = model
        self._known: dict[int, tuple[str, WeightCopies]] = {}
        self._recomputation = Recomputation(lambda begins: report("recompute" if begins else "recompute end"))
        self._stack: list[str] = []
        self._installed = contextlib.ExitStack()

    def start(self) -> None:
        """Register the hooks."""
        for name, module in self._model.named_modules():
            path = name or type(module).__name__
            self._known.setdefault(id(module), (path, weight_copies(module)))
        for layer in output_layers(self._model):
            self._report(OUTPUT_LAYER, None, layer)
            for name in around(layer):
                self._report(AROUND_OUTPUT_LAYER, None, name or type(self._model).__name__)
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            self._installed.callback(handle.remove)
        self._installed.enter_context(self._recomputation.following(self._caller, self._again))

    def stop(self) -> None:
        """Remove the hooks."""
        self._installed.close()

    def _caller(self) -> str:
        """Return the path of the module that is being called, "" for none."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def _again(self, path: str) -> Iterator[None]:
        """Run the block for a module, as if it were being called."""
        self._begin(path, ())
        try:
            yield
        finally:
            self._end()

    def _begin(self, path: str, copies: WeightCopies) -> None:
        self._stack.append(path)
        self._report("call", None, path, copies)

    def _end(self) -> None:
        self._stack.pop()
        self._report("return")

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._recomputation.module_called(len(self._stack))
        path, copies = self._known.get(id(module)) or (type(module).__name__, weight_copies(module))
        self._begin(path, copies if torch.is_autocast_enabled("cuda") else ())

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._stack:
            self._end()
            self._recomputation.module_returned(len(self._stack))


def weight_copies(module: nn.Module) -> WeightCopies:
    """Return the weights that autocast may copy when ``module`` runs: trained float32 weights, if one is a matrix.

    An embedding table is looked up, not multiplied.  Attention multiplies by the weight of its output projection
    without calling that module.  Source: ``cached_cast`` (aten/src/ATen/autocast_mode.cpp, torch 2.9-2.13).
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ()
    own: Sequence[nn.Parameter] = list(module.parameters(recurse=isinstance(module, nn.MultiheadAttention)))
    if not any(parameter.dim() > 1 for parameter in own):
        return ()
    return tuple(
        (id(parameter), 2 * parameter.numel())
        for parameter in own
        if parameter.dtype == torch.float32 and parameter.requires_grad
    )


class GenerationTimes:
    """Seconds to the first token and per further token of each call of ``generate()``.

    Attributes:
        cache: Number of sequences in the cache, its bytes, and those of one token of one sequence.
        tokens: Tokens that the last call generated.
    """

    def __init__(self) -> None:
        self.cache = (0, 0, 0)
        self.tokens = 0
        self._moments: list[float] = []
        self._first: list[float] = []
        self._further: list[float] = []

    def began(self, tokens: int) -> None:
        """Begin a call that generates ``tokens`` tokens."""
        self.tokens, self._moments = tokens, [time.perf_counter()]

    def first_token(self) -> None:
        """Note that the first token is known: the CPU has read whether it is the last."""
        self._moments.append(time.perf_counter())

    def ended(self) -> None:
        """End a call."""
        torch.cuda.synchronize()
        self._moments.append(time.perf_counter())
        self._first.append(self._moments[1] - self._moments[0])
        if len(self._moments) == 3:
            self._further.append((self._moments[2] - self._moments[1]) / (self.tokens - 1))

    def first_token_seconds(self, warm_up: int) -> float | None:
        """Return the median time to the first token after ``warm_up`` calls; None without one."""
        return median(self._first[warm_up:]) if self._first[warm_up:] else None

    def token_seconds(self, warm_up: int) -> float | None:
        """Return the median time of a further token after ``warm_up`` calls; None without one."""
        return median(self._further[warm_up:]) if self._further[warm_up:] else None


class AllocatorCounters(NamedTuple):
    """Counters of PyTorch's allocator: allocations and releases so far, and peak allocated bytes."""

    events: int
    peak_bytes: int


def read_counters(device: int | None = None) -> AllocatorCounters:
    """Read the allocator's counters for ``device`` (``None``: the current one).

    Reads them from the allocator itself: ``torch.cuda.memory_stats`` flattens and sorts the same answer, which takes
    ten times as long.
    """
    statistics = torch._C._cuda_memoryStats(torch.cuda.current_device() if device is None else device)
    calls, held = statistics["allocation"]["all"], statistics["allocated_bytes"]["all"]
    return AllocatorCounters(int(calls["allocated"]) + int(calls["freed"]), int(held["peak"]))


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the addresses of the storages of those ``tensors`` that are on a GPU, and of this rank's parts."""
    parts = (numbers(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors)
    return [part.untyped_storage().data_ptr() for part in parts if part.is_cuda]


class TraceRecorder(Observer):
    """Observer that takes a note at each event of the loop and, at first, at each module call.

    It keeps addresses, never tensors.  Subclasses decide when addresses are read.

    Attributes:
        notes: The notes so far.
        tracked_steps: The steps in which module calls were recorded.
        step: The current optimizer step, from 0.
    """

    def __init__(self, read: Callable[[], AllocatorCounters] = read_counters) -> None:
        """Take ``read``, which returns the allocator's counters."""
        self.notes: list[Note] = []
        self.tracked_steps: list[int] = []
        self.step = -1
        self._read = read
        self._model: nn.Module | None = None
        self._further: dict[str, nn.Module] = {}
        self._optimizer: Any = None
        self._parameters: list[nn.Parameter] = []
        self._tracker: ModuleTracker | None = None

    def reference_loaded(self, model: nn.Module) -> None:
        self._further["reference_weight"] = model

    def average_kept(self, model: nn.Module) -> None:
        self._further["average_weight"] = model

    def forward_end(self) -> None:
        self._note("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        self._note("backward end")

    def zero_grad_begin(self) -> None:
        self._note("zero_grad")

    def zero_grad_end(self) -> None:
        self._note("zero_grad end")

    def failed(self) -> None:
        """Note all known addresses after the step raised, while the exception's frames still hold its tensors."""
        if self._model is not None:
            self._note("failed", **self.known_addresses())

    def track_modules(self) -> None:
        """Start to note module calls."""
        self.stop_tracking()
        assert self._model is not None
        self._tracker = ModuleTracker(self._model, self._report)
        self._tracker.start()

    def stop_tracking(self) -> None:
        """Stop noting module calls."""
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None

    def known_addresses(self) -> dict[str, list[int]]:
        """Return the current address of every tensor whose purpose is known, by label."""
        return {**self._model_addresses(), **self._training_addresses()}

    def _model_addresses(self) -> dict[str, list[int]]:
        assert self._model is not None
        self._parameters = list(self._model.parameters())
        return {
            "weight": addresses(map(part_of, self._parameters)),
            "buffer": addresses(self._model.buffers()),
            "scale": addresses(scales(self._model)),
            **{
                label: addresses([*map(part_of, model.parameters()), *model.buffers(), *scales(model)])
                for label, model in self._further.items()
            },
        }

    def _training_addresses(self) -> dict[str, list[int]]:
        """Return the addresses of gradients and optimizer states."""
        found = self._engine_addresses()
        return {**found, "gradient": self._gradient_addresses(), "optimizer_state": self._state_addresses()}

    def _gradient_addresses(self) -> list[int]:
        own = (parameter.grad for parameter in self._parameters if parameter.grad is not None)
        return [*addresses(own), *self._engine_addresses().get("gradient", ())]

    def _engine_addresses(self) -> dict[str, list[int]]:
        """Return the addresses of what DeepSpeed's optimizers hold beside their states; nothing for others."""
        return {label: addresses(tensors) for label, tensors in engine_tensors(self._optimizer).items()}

    def _state_addresses(self) -> list[int]:
        return addresses(tensors_in(getattr(self._optimizer, "state", {})))

    def _note(self, name: str, **found: list[int]) -> None:
        self._report(name, found)

    def _report(
        self,
        name: str,
        found: Mapping[str, list[int]] | None = None,
        module: str = "",
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._write(self._read(), name, found, module, copies)

    def _write(
        self,
        now: AllocatorCounters,
        name: str,
        found: Mapping[str, list[int]] | None = None,
        module: str = "",
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._begin(now)
        self.notes.append(Note(now.events, name, self.step, found or {}, module, copies))

    def _begin(self, now: AllocatorCounters) -> None:
        """Prepare for a note."""


class RunRecorder(TraceRecorder):
    """Recorder of a measured run, which reads gradients and optimizer states in every step.

    Modules are tracked during the warm-up only, so that the timed steps cost little more than PyTorch's own recording.
    """

    def __init__(self, warm_up: int = WARM_UP_STEPS) -> None:
        super().__init__()
        self._warm_up = warm_up
        self._states: list[int] = []
        self._num_states = -1
        self._states_move = False

    def loaded(self, model: nn.Module) -> None:
        self._model = model
        self._note("loaded", **self._model_addresses())
        self.track_modules()

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._parameters = list(model.parameters())

    def step_begin(self, step: int) -> None:
        self.step = step
        self._note("step", **self._engine_addresses())

    def micro_step_begin(self, micro_step: int) -> None:
        # Loops may move the model after it was loaded: recurrent layers join their weights when sent to a device.
        is_first = self.step == 0 and micro_step == 0
        self._note("forward", **(self._model_addresses() if is_first else {}))

    def optimizer_begin(self) -> None:
        self._note("optimizer", gradient=self._gradient_addresses())

    def optimizer_end(self) -> None:
        self._note("optimizer end", optimizer_state=self._changed_states())

    def step_end(self, step: int) -> None:
        self._note("step end")
        if self._tracker is not None:
            self.tracked_steps.append(step)
            if step + 1 >= self._warm_up:
                self.stop_tracking()

    def evaluation_begin(self, batches: int) -> None:
        self._note("evaluation")

    def repeat_evaluation(self, batch: Any) -> Any:
        self._note(
            "evaluation forward",
            input=addresses(each for each in tree_leaves(dict(batch)) if isinstance(each, torch.Tensor)),
        )

    def evaluation_forward_end(self, outputs: Any) -> None:
        self._note("evaluation forward end")

    def evaluation_end(self) -> None:
        self._note("evaluation end")

    def saving_begin(self) -> None:
        self._note("saving")

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        self._note("saving end")

    def restoring_begin(self, purpose: RestoringPurpose) -> None:
        self._note("restoring")

    def restoring_end(self) -> None:
        self._note("restoring end")

    def generation_begin(self, tokens: int) -> None:
        self._note("generation")

    def token_begin(self, token: int) -> None:
        self._note("token")

    def cached(self, tensors: list[torch.Tensor]) -> None:
        self._note("cached", key_value_cache=addresses(tensors))

    def communicates(self, tensors: list[torch.Tensor]) -> None:
        """Note the buffers of a collective (see ``communication``)."""
        self._note(COMMUNICATION, communication_buffer=addresses(tensors))

    def gathered(self, storage: torch.UntypedStorage) -> None:
        """Note a gathered weight."""
        if storage.device.type == "cuda":
            self._note(COMMUNICATION, gathered_weight=[storage.data_ptr()])

    def buckets_begin(self) -> None:
        """Note that what is allocated from now on are buckets."""
        self._note(BUCKETS)

    def buckets_end(self) -> None:
        """Note that they are allocated."""
        self._note(f"{BUCKETS} end")

    def generation_end(self) -> None:
        self._note("generation end")

    def _changed_states(self) -> list[int]:
        """Return the addresses of the optimizer's states if they changed, or during the warm-up; else nothing."""
        state = getattr(self._optimizer, "state", {})
        number = sum(len(entry) if isinstance(entry, dict) else 1 for entry in state.values())
        if number == self._num_states and not self._states_move and self.step >= self._warm_up:
            return []
        found = self._state_addresses()
        self._states_move = number == self._num_states and found != self._states
        self._num_states, self._states = number, found
        return found
