"""Tells the tape what only the loop knows: when a step begins, and which tensors are weights, gradients, optimizer
states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainatomy.simulator.recorder import Recorder
from trainatomy.training.states import tensors_in

#: Micro-batches of a step that are executed: with gradients new, with gradients there (twice), and the last, on which
#: the optimizer waits.
EXECUTED_MICRO_STEPS = 4


class Watcher:
    """The observer of a simulated run (``training.observer.Observer``) of so many ``steps``; the operations of the last
    are written."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self._recorder = recorder
        self._operations = recorder.operations
        self._last = steps - 1
        self._micro_steps = 1
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def loaded(self, model: nn.Module) -> None:
        """Everything on the device now is the model's."""
        self._model = model
        self._label(model.parameters(), "weight")
        self._label(model.buffers(), "buffer")
        self._recorder.mark("loaded")
        self._stage("other")

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer is known; some make their states at once."""
        self._optimizer = optimizer
        self._states()
        if self._last == 0:
            self._operations.start(0)

    def step_begin(self, step: int) -> None:
        """A step begins; what the loop takes from here on is its own."""
        self._recorder.step = step
        self._recorder.mark("step")
        self._stage("other")

    def micro_step_begin(self, micro_step: int) -> None:
        """Forward begins."""
        self._recorder.mark("forward")
        third = micro_step == EXECUTED_MICRO_STEPS - 2
        self._operations.micro_step = micro_step
        self._operations.repeats = max(1, self._micro_steps - EXECUTED_MICRO_STEPS + 1) if third else 1
        self._stage("forward")

    def leaves_out(self, micro_step: int, of: int) -> bool:
        """Micro-batches between the third and the last do again what the third did."""
        self._micro_steps = of
        left_out = EXECUTED_MICRO_STEPS - 1 <= micro_step < of - 1
        if left_out:
            self._operations.skip_placeholder()
        return left_out

    def forward_end(self) -> None:
        """What forward made and is still held, is held for backward."""
        self._recorder.mark("forward end")
        self._stage("other")

    def micro_step_end(self, micro_step: int) -> None:
        """Gradients are there."""
        self._gradients()
        self._recorder.mark("backward end")
        self._operations.repeats = 1

    def optimizer_begin(self) -> None:
        """The optimizer's step begins."""
        self._gradients()
        self._recorder.mark("optimizer")
        self._stage("optimizer")

    def optimizer_end(self) -> None:
        """States are there."""
        self._states()
        self._recorder.mark("optimizer end")
        self._stage("other")

    def zero_grad_begin(self) -> None:
        """Gradients are about to go."""
        self._recorder.mark("zero_grad")
        self._operations.stage = "zero_grad"

    def zero_grad_end(self) -> None:
        """Gradients went, or were filled with zeros."""
        self._recorder.mark("zero_grad end")
        self._operations.stage = self._recorder.stage

    def step_end(self, step: int) -> None:
        """The step is over."""
        self._recorder.mark("step end")
        if step == self._last - 1:  # what the loop does between steps belongs to the next: batches go to the device
            self._operations.start(self._last)
        elif step == self._last:
            self._operations.stop()

    def _stage(self, name: str) -> None:
        self._recorder.stage = self._operations.stage = name

    def _gradients(self) -> None:
        assert self._model is not None
        self._label((p.grad for p in self._model.parameters() if p.grad is not None), "gradient")

    def _states(self) -> None:
        if self._optimizer is not None:
            state = getattr(self._optimizer, "state", {})
            self._label(tensors_in(list(state.values())), "optimizer_state")

    def _label(self, tensors: Any, label: str) -> None:
        for tensor in tensors:
            self._recorder.label(tensor, label)
