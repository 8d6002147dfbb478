"""The interface through which a loop notifies its observer of the phases of a step.

The order of calls in one run (``n`` optimizer steps of ``m`` micro-batches)::

    loaded, [reference_loaded], [average_kept], [restoring], ready, [restoring], n × [ step_begin,
                         m × (micro_step_begin, forward_end, loss_kept, micro_step_end),
                         optimizer_begin, optimizer_end, zero_grad_begin, zero_grad_end,
                         step_end,
                         evaluation, [saving] ], [restoring]

    evaluation: evaluates_after → False, or
                evaluation_begin, e × (repeat_evaluation, evaluation_forward_begin, evaluation_forward_end),
                evaluation_end
    saving: saving_begin, saving_end; restoring: restoring_begin, restoring_end

Between the last ``micro_step_end`` and ``optimizer_begin`` gradients are unscaled and clipped.  The Trainer moves the
batches of a step to the device before ``step_begin``, and zeroes gradients once between ``ready`` and the first step.
In a pipeline the micro-batches of a step overlap, and each part of one is between ``stage_begin`` and ``stage_end``.
In ``generation`` a step is one call of ``generate()``: generation_begin, cached …, (t - 1) × token_begin,
generation_end.
Inference has no optimizer: ``ready`` gets ``None``, and a step has neither an optimizer phase nor gradients to zero.

An observer keeps no tensor that a loop passes to it, so observing cannot prolong the life of one.

The position in a training loop, from signals that every loop gives.

============================  =====================================================
the forward pass begins       the outermost model is called with gradients enabled
the loss is computed          ``torch.autograd.backward`` is called (``loss.backward()`` calls it)
the backward pass ends        it returns
the optimizer's step          the step hooks of ``torch.optim.Optimizer``
gradients are zeroed          ``zero_grad`` of the model or the optimizer
the step ends                 gradients are zeroed after a backward, or a forward follows an optimizer step
============================  =====================================================

An optimizer that is given a closure computes the loss within its step, which then begins the loop's.

``integrations.hooks`` attaches them to one model and optimizer of a live process, ``scripts.signals`` to all of a
process.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from trainatomy.results.tasks import RestoringPurpose


StageWork = Literal["forward", "backward", "backward_input", "backward_weight"]
"""Actions of a pipeline's stage on a micro-batch; the last two are the halves of a divided backward pass."""


class Observer:
    """Hooks into a loop, which do nothing; each is called on the loop's thread at the moment that its name says."""

    def loaded(self, model: nn.Module) -> None:
        """The model is on the device, in the dtype in which it stays."""

    def reference_loaded(self, model: nn.Module) -> None:
        """A model that is not trained, with which the loss compares the trained one, is on the device."""

    def average_kept(self, model: nn.Module) -> None:
        """A moving average of the weights is on the device, as a copy of the model."""

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer exists.  Read ``optimizer.state`` only when it is needed: the Trainer replaces it once."""

    def step_begin(self, step: int) -> None:
        """Optimizer step ``step`` (from 0) begins."""

    def micro_step_begin(self, micro_step: int) -> None:
        """Micro-batch ``micro_step`` (from 0 in each step) begins: its forward is next."""

    def leaves_out(self, micro_step: int, of: int) -> bool:
        """Return whether micro-batch ``micro_step`` of ``of`` may be skipped, because it repeats the one before.

        Always False in a real training; a simulation may skip the repetition.
        """
        return False

    def repeat(self, micro_step: int, batch: Any) -> torch.Tensor | None:
        """Return the loss of micro-batch ``micro_step`` if it need not be executed, because it repeats an earlier one.

        Always None in a real training; a simulation may copy what the earlier one did.  ``batch`` is on the device.
        """
        return None

    def forward_end(self) -> None:
        """The loss is computed and the model's other outputs are released; backward is next."""

    def loss_kept(self, loss: torch.Tensor) -> None:
        """Backward of this micro-batch is over; the loop keeps ``loss`` until the next one's takes its place."""

    def micro_step_end(self, micro_step: int) -> None:
        """Backward of this micro-batch is over."""

    def stage_begin(self, work: StageWork, stage: int, micro_batch: int) -> None:
        """A stage of a pipeline begins a part of a micro-batch."""

    def stage_end(self) -> None:
        """It is over."""

    def optimizer_begin(self) -> None:
        """Gradients are clipped; the optimizer's step is next."""

    def optimizer_end(self) -> None:
        """The optimizer's step is over."""

    def zero_grad_begin(self) -> None:
        """Gradients are about to be zeroed or released."""

    def zero_grad_end(self) -> None:
        """Gradients have been zeroed or released."""

    def step_end(self, step: int) -> None:
        """Optimizer step ``step`` is over."""

    def evaluates_after(self, step: int) -> bool:
        """Return whether the training evaluates and saves after optimizer step ``step``, as far as it does."""
        return False

    def saving_begin(self) -> None:
        """A checkpoint is about to be saved."""

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        """A checkpoint has been saved in ``folder``: its files with their bytes."""

    def restoring_begin(self, purpose: RestoringPurpose) -> None:
        """A checkpoint is about to be loaded: to continue a training (in two parts), or as the best one."""

    def restoring_end(self) -> None:
        """It has been loaded, or a part of it."""

    def evaluation_begin(self, batches: int) -> None:
        """An evaluation of ``batches`` batches begins: after a step, or before the first one."""

    def repeat_evaluation(self, batch: Any) -> Any:
        """Return the outputs of an evaluation batch if it need not be executed, because it repeats an earlier one.

        Always None in a real training.  ``batch`` is on the device.
        """
        return None

    def evaluation_forward_begin(self) -> None:
        """The forward of an evaluation batch is next."""

    def evaluation_forward_end(self, outputs: Any) -> None:
        """The forward of an evaluation batch is over; the loop gathers ``outputs`` now."""

    def evaluation_end(self) -> None:
        """The evaluation is over: what it gathered is on the host."""

    def repeat_generation(self, step: int) -> bool:
        """Return whether call ``step`` of ``generate()`` need not be executed, because it repeats the one before.

        Always False on a GPU.
        """
        return False

    def repeat_generate(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the tokens of a call of ``model.generate()`` that need not be executed, as it repeats the one before.

        None on a GPU, and for a call that is executed; ``generated`` follows both.
        """
        return None

    def generation_begin(self, tokens: int) -> None:
        """``generate()`` is about to be called; it will generate ``tokens`` tokens for each prompt."""

    def token_begin(self, token: int) -> None:
        """The first tokens have been chosen, and number ``token`` (from 1) is next."""

    def cached(self, tensors: list[torch.Tensor]) -> None:
        """A forward begins or ends with these keys and values."""

    def generation_end(self) -> None:
        """``generate()`` has returned."""

    def generated(self, tokens: torch.Tensor, word: int) -> None:
        """A training is about to use these tokens: its prompts, each followed by what was generated for it.

        ``word`` is a token that ends no sequence.
        """

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """The model of a loop that is not ours is about to be called with these arguments."""

    def tick(self) -> None:
        """A step of such a loop is over on the CPU: all its work has been queued on the GPU."""


class LoopSignals:
    """Translator of signals into the events of a loop, which it reports to ``listener``.

    A subclass attaches the signals, and says when a step is over and whose gradients count.
    """

    def __init__(self, listener: Observer) -> None:
        self._listener = listener
        self._attached = ExitStack()
        self._step = -1
        self._micro_step = 0
        self._in_step = self._in_forward = self._optimizer_has_stepped = self._has_gradients = False
        self._backward_depth = 0
        self._in_optimizer = False

    def is_over(self) -> bool:
        """Return whether a forward that comes now begins another step."""
        return self._optimizer_has_stepped

    def is_over_once_zeroed(self) -> bool:
        """Return whether zeroing gradients now ends the step; a scaler may have skipped the optimizer's."""
        return self._has_gradients

    def concerns(self, owner: Any) -> bool:
        """Return whether the gradients of a model or an optimizer are those of the loop."""
        return True

    def detach(self) -> None:
        """Remove everything; a step that is over ends."""
        self._attached.close()
        if self._in_step and self.is_over():
            self._end_step()

    def forward(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Note that the outermost model is called."""
        if self._in_step and self.is_over():
            self._end_step()
        self._begin_step()
        if self._in_optimizer:
            self._listener.optimizer_end()
        self._listener.batch(arguments, keywords)
        self._listener.micro_step_begin(self._micro_step)
        self._in_forward = True

    def around_backward(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Wrap ``torch.autograd.backward``, which reentrant checkpointing calls again inside."""
        self._backward_depth += 1
        try:
            if self._backward_depth == 1:
                self._begin_step()
                self._end_forward()
            result = original(*arguments, **keywords)
            if self._backward_depth == 1:
                self._has_gradients = True
                self._end_micro_step()
                if self._in_optimizer:
                    self._listener.optimizer_begin()
            return result
        finally:
            self._backward_depth -= 1

    def optimizer_begins(self) -> None:
        """Note that an optimizer takes its step."""
        self.end_step_that_is_over()  # with a closure, no forward pass came before
        self._begin_step()
        self._optimizer_goes_on()

    def _optimizer_goes_on(self) -> None:
        self._listener.optimizer_begin()
        self._in_optimizer = True

    def optimizer_ends(self) -> None:
        """Note that it has taken it."""
        self._in_optimizer = False
        self._listener.optimizer_end()
        if not self._optimizer_has_stepped:
            self._listener.tick()
        self._optimizer_has_stepped = True

    def around_zero_grad(self, original: Callable[..., Any], owner: Any, *arguments: Any, **keywords: Any) -> Any:
        """Wrap ``zero_grad`` of a model or an optimizer."""
        if not self.concerns(owner):
            return original(owner, *arguments, **keywords)
        self._listener.zero_grad_begin()
        result = original(owner, *arguments, **keywords)
        self._listener.zero_grad_end()
        if self._in_step and not self._in_optimizer and self.is_over_once_zeroed():
            if not self._optimizer_has_stepped:
                self._listener.tick()
            self._end_step()
        return result

    def _begin_step(self) -> None:
        if not self._in_step:
            self._step += 1
            self._in_step = True
            self._listener.step_begin(self._step)

    def end_step_that_is_over(self) -> None:
        """End a step whose optimizers have stepped, before work that belongs to another step or to none."""
        if self._in_step and self._optimizer_has_stepped and self.is_over():
            self._end_step()

    def _end_step(self) -> None:
        self._listener.step_end(self._step)
        self._in_step = self._in_forward = self._optimizer_has_stepped = self._has_gradients = False
        self._micro_step = 0

    def _end_forward(self) -> None:
        if self._in_forward:
            self._listener.forward_end()
            self._in_forward = False

    def _end_micro_step(self) -> None:
        self._listener.micro_step_end(self._micro_step)
        self._micro_step += 1


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    """Remove a hook at the end of the context."""
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Call ``around(original, ...)`` in place of a function of a module or class during the context.

    If other code wraps our wrapper meanwhile, it stays in place and only forwards calls afterwards.
    """
    original = vars(owner)[name]
    is_active = True

    @functools.wraps(original)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        if is_active:
            return around(original, *arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        is_active = False
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)
