"""Record a user's own training loop at little cost.

The loop pays for everything here.  A note costs one read of the allocator's counters, which build a dictionary each
time (some 20 microseconds); so everything at one instant is noted with one read.  Reading the addresses of gradients
and optimizer states takes thousands of Python calls: they are read only at the end of a step in which the peak rose,
because only allocations held at the peak need a label.

Find out where a user's training loop is, by hooks on its model and optimizer.

The loop itself is not changed.  Its model and its optimizer carry hooks while it is watched; the functions that every
loop calls (``torch.autograd.backward``, the two ``zero_grad``) are wrapped, and restored at the end.  What their calls
mean is in ``training.signals``.

Without an optimizer (inference), every forward is a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainatomy.measurement.step import recorder
from trainatomy.measurement.step.instruments import Monitors, Stopwatch
from trainatomy.measurement.step.recorder import AllocatorCounters, TraceRecorder
from trainatomy.measurement.traces.history import Note
from trainatomy.measurement.traces.trace import PHASES
from trainatomy.results.memory import Instant
from trainatomy.training.observer import LoopSignals, Observer, removed, wrapped


class Hook:
    """A hook that works for one object only: a copy or pickle of it does nothing.

    So a watched model can be copied and saved.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        self._function(*arguments, **keywords)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _make_inert_hook, ()


def _make_inert_hook() -> Callable[..., None]:
    return inert_hook


def inert_hook(*arguments: Any, **keywords: Any) -> None:
    """Do nothing; stands in for a copied hook."""


class LoopHooks(LoopSignals):
    """Reports the events of one loop, over ``model`` and ``optimizer``, to ``listener`` while attached."""

    def __init__(self, model: nn.Module, optimizer: Any, listener: Observer) -> None:
        super().__init__(listener)
        self.model = model
        self.optimizer = unwrap_optimizer(optimizer)

    def attach(self) -> None:
        """Register the hooks and wrap the functions."""
        enter = self._attached.enter_context
        enter(removed(self.model.register_forward_pre_hook(Hook(self._on_forward), prepend=True, with_kwargs=True)))
        enter(removed(self.model.register_forward_hook(Hook(self._on_forward_return), always_call=True)))
        enter(wrapped(torch.autograd, "backward", self.around_backward))
        enter(wrapped(defining_class(self.model, "zero_grad"), "zero_grad", self.around_zero_grad))
        if self.optimizer is None:
            return
        enter(wrapped(defining_class(self.optimizer, "zero_grad"), "zero_grad", self.around_zero_grad))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            enter(removed(self.optimizer.register_step_pre_hook(Hook(lambda *_: self.optimizer_begins()))))
            enter(removed(self.optimizer.register_step_post_hook(Hook(lambda *_: self.optimizer_ends()))))

    def is_over(self) -> bool:
        """Return whether the optimizer has stepped; without one, each forward is a step."""
        return self._optimizer_has_stepped or self.optimizer is None

    def concerns(self, owner: Any) -> bool:
        """Return whether a model or an optimizer is the watched one, perhaps in a wrapper."""
        return owner is self.optimizer or owner is self.model or getattr(owner, "module", None) is self.model

    def _on_forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.is_grad_enabled() or self.optimizer is None:
            self.forward(arguments, keywords)

    def _on_forward_return(self, *_: Any) -> None:
        if self._in_forward and not torch.is_grad_enabled():
            self._end_forward()
            self._end_micro_step()
            self._listener.tick()


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper (an ``Optimizer`` in name only), or the optimizer itself."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def defining_class(instance: Any, name: str) -> Any:
    """Return the class that defines the method ``name`` of ``instance``."""
    return next(kind for kind in type(instance).__mro__ if name in vars(kind))


_FIRST_TRACKED_STEPS = 2
"""Steps in which module calls are noted at first: the first one makes lasting allocations (workspaces, states) that no
other step makes."""
_LATER_TRACKED_STEPS = 1
"""The same in each later window of the history."""


class LiveRecorder(TraceRecorder):
    """Recorder of a user's loop; keeps addresses and sizes, never tensors.

    Attributes:
        steps: Completed steps.
        samples: Samples of each step.
        tokens: Tokens of each step.
        first_batch: The first batch on the CPU, if it is kept.
        autocast: The dtype in which modules compute under autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        stopwatch: Stopwatch,
        read: Callable[[], AllocatorCounters],
        on_step_end: Callable[[AllocatorCounters], None],
        *,
        keep_batch: bool = False,
        monitors: Monitors | None = None,
    ) -> None:
        """Record the training of ``model`` by ``optimizer``.

        Args:
            model: The model.
            optimizer: The optimizer, or ``None`` for inference.
            stopwatch: Times the steps.
            read: Returns the allocator's counters.
            on_step_end: Called after each step with the counters; may call ``track_modules`` to begin anew.
            keep_batch: Keep the first batch on the CPU.
            monitors: Told of the end of each step.
        """
        super().__init__(read)
        self._model, self._optimizer = model, optimizer
        self._stopwatch, self._on_step_end, self._keep_batch = stopwatch, on_step_end, keep_batch
        self._monitors = monitors or Monitors()
        self._labelled_peak = 0
        self._step_is_new = False
        self._first_parameter: list[int] = []
        self._steps_to_track = _FIRST_TRACKED_STEPS
        self._inputs: list[int] = []
        self.first_batch: dict[str, Any] | None = None
        self.autocast: torch.dtype | None = None
        self.steps = 0
        self.samples: list[int] = []
        self.tokens: list[int] = []

    @property
    def optimizer(self) -> Any:
        """The optimizer of the loop."""
        return self._optimizer

    def step_begin(self, step: int) -> None:
        self.step = step
        self.samples.append(0)
        self.tokens.append(0)
        self._step_is_new = True

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Count the samples and tokens of a batch and remember its addresses."""
        tensors = list(_tensors((arguments, keywords)))
        first = keywords.get("input_ids", next(iter(tensors), None))
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            self.samples[-1] += first.shape[0]
            self.tokens[-1] += first.numel() if first.dim() == 2 and not first.is_floating_point() else 0
        self._inputs = recorder.addresses(tensors)
        if self._keep_batch and self.first_batch is None and not arguments:
            on_cpu = {name: _to_cpu(value) for name, value in keywords.items()}
            self.first_batch = {name: value for name, value in on_cpu.items() if value is not None}

    def micro_step_begin(self, micro_step: int) -> None:
        self._note("forward", input=self._inputs)

    def optimizer_begin(self) -> None:
        self._note("optimizer")

    def optimizer_end(self) -> None:
        self._note_with_addresses("optimizer end")

    def tick(self) -> None:
        """Note the time: the work of a step has been queued on the GPU."""
        self._stopwatch.tick()
        self._monitors.step_ended()

    def zero_grad_begin(self) -> None:
        self._note_with_addresses("zero_grad")

    def step_end(self, step: int) -> None:
        now = self._read()
        self._write(now, "step end")
        self.steps += 1
        if self._tracker is not None:
            self.tracked_steps.append(step)
            if len(self.tracked_steps) >= self._steps_to_track:
                self.stop_tracking()
                self._steps_to_track = _LATER_TRACKED_STEPS
        self._on_step_end(now)

    def track_modules(self) -> None:
        """Begin new notes, and note module calls in the next steps; later steps are matched to them."""
        self.notes, self.tracked_steps = [], []
        super().track_modules()

    def instant(self) -> Instant:
        """Return the current position in the loop."""
        phases = (PHASES[note.name] for note in reversed(self.notes) if note.name in PHASES)
        return Instant(self.step, next(phases, "load"), "", "")

    def _model_addresses(self) -> dict[str, list[int]]:
        found = super()._model_addresses()
        self._first_parameter = recorder.addresses(self._parameters[:1])
        return found

    def _note_with_addresses(self, name: str) -> None:
        """Take a note, with the known addresses if the peak rose since they were last read."""
        now = self._read()
        found: dict[str, list[int]] = {}
        if now.peak_bytes > self._labelled_peak:
            self._labelled_peak = now.peak_bytes
            moved = not self._parameters or recorder.addresses(self._parameters[:1]) != self._first_parameter
            found = self.known_addresses() if moved else self._training_addresses()
        self._write(now, name, found)

    def _report(
        self,
        name: str,
        found: Mapping[str, list[int]] | None = None,
        module: str = "",
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        if copies:
            self.autocast = torch.get_autocast_dtype("cuda")
        super()._report(name, found, module, copies)

    def _begin(self, now: AllocatorCounters) -> None:
        if self._step_is_new:  # a step begins with the first thing noted in it, so that it needs no read of its own
            self._step_is_new = False
            self.notes.append(Note(now.events, "step", self.step, {}))


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)
