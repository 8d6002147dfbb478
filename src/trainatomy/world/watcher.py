"""Tells the tape what only the loop knows: when a step begins, and which tensors are weights, gradients, optimizer
states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainatomy.training.states import tensors_in
from trainatomy.world.recorder import Recorder

#: Micro-batches of a step that are executed: with gradients new, with gradients there (twice), and the last, on which
#: the optimizer waits.
EXECUTED_MICRO_STEPS = 4


class Watcher:
    """The observer of a simulated run (``training.observer.Observer``)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def loaded(self, model: nn.Module) -> None:
        """Everything on the device now is the model's."""
        self._model = model
        self._label(model.parameters(), "weight")
        self._label(model.buffers(), "buffer")
        self._recorder.mark("loaded")
        self._recorder.stage = "other"

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer is known; some make their states at once."""
        self._optimizer = optimizer
        self._states()

    def step_begin(self, step: int) -> None:
        """A step begins; what the loop takes from here on is its own."""
        self._recorder.step = step
        self._recorder.mark("step")
        self._recorder.stage = "other"

    def micro_step_begin(self, micro_step: int) -> None:
        """Forward begins."""
        self._recorder.mark("forward")
        self._recorder.stage = "forward"

    def leaves_out(self, micro_step: int, of: int) -> bool:
        """Micro-batches between the third and the last do again what the third did."""
        return EXECUTED_MICRO_STEPS - 1 <= micro_step < of - 1

    def forward_end(self) -> None:
        """What forward made and is still held, is held for backward."""
        self._recorder.mark("forward end")
        self._recorder.stage = "other"

    def micro_step_end(self, micro_step: int) -> None:
        """Gradients are there."""
        self._gradients()
        self._recorder.mark("backward end")

    def optimizer_begin(self) -> None:
        """The optimizer's step begins."""
        self._gradients()
        self._recorder.mark("optimizer")
        self._recorder.stage = "optimizer"

    def optimizer_end(self) -> None:
        """States are there."""
        self._states()
        self._recorder.mark("optimizer end")
        self._recorder.stage = "other"

    def zero_grad_begin(self) -> None:
        """Gradients are about to go."""
        self._recorder.mark("zero_grad")

    def zero_grad_end(self) -> None:
        """Gradients went, or were filled with zeros."""
        self._recorder.mark("zero_grad end")

    def step_end(self, step: int) -> None:
        """The step is over."""
        self._recorder.mark("step end")

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
