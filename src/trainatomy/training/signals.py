"""The position in a training loop, from signals that every loop gives.

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
from typing import TYPE_CHECKING, Any, Protocol

from trainatomy.training.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class LoopListener(Observer, Protocol):
    """An observer that also sees the model's arguments and when to take the time."""

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Handle a call of the model that is about to begin, with these arguments; keep no tensor of them."""

    def tick(self) -> None:
        """Handle the end of a step on the CPU: all its work has been queued on the GPU."""


class LoopSignals:
    """Translator of signals into the events of a loop, which it reports to ``listener``.

    A subclass attaches the signals, and says when a step is over and whose gradients count.
    """

    def __init__(self, listener: LoopListener) -> None:
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
