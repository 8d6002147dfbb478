"""Find out where a user's training loop is, by hooks on its model and optimizer.

The loop itself is not changed.  Its model and its optimizer carry hooks while it is watched; the functions that every
loop calls (``torch.autograd.backward``, the two ``zero_grad``) are wrapped, and restored at the end:

============================  =====================================================
the forward pass begins       forward pre-hook of the outermost model, with gradients enabled
the loss is computed          ``torch.autograd.backward`` is called (``loss.backward()`` calls it)
the backward pass ends        it returns
the optimizer's step          the step hooks of ``torch.optim.Optimizer``
gradients are zeroed          ``zero_grad`` of the model or the optimizer
the step ends                 gradients are zeroed after a backward, or a forward follows an optimizer step
============================  =====================================================

A gradient scaler that skips a step does not call the optimizer: then ``zero_grad`` ends the step.  Without an optimizer
(inference), every forward is a step.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainatomy.training.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn


class LoopListener(Observer, Protocol):
    """An observer that also sees the model's arguments and when to take the time."""

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Called before the model with its arguments; must keep no tensor of them."""

    def tick(self) -> None:
        """Called when the work of a step has been queued on the GPU."""


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


class LoopHooks:
    """Reports the events of one loop, over ``model`` and ``optimizer``, to ``listener`` while attached."""

    def __init__(self, model: nn.Module, optimizer: Any, listener: LoopListener) -> None:
        self.model = model
        self.optimizer = unwrap_optimizer(optimizer)
        self._listener = listener
        self._attached = ExitStack()
        self._step = -1
        self._micro_step = 0
        self._in_step = self._in_forward = self._optimizer_has_stepped = self._has_gradients = False
        self._backward_depth = 0

    def attach(self) -> None:
        """Register the hooks and wrap the functions."""
        enter = self._attached.enter_context
        enter(removed(self.model.register_forward_pre_hook(Hook(self._on_forward), prepend=True, with_kwargs=True)))
        enter(removed(self.model.register_forward_hook(Hook(self._on_forward_return), always_call=True)))
        enter(wrapped(torch.autograd, "backward", self._around_backward))
        enter(wrapped(defining_class(self.model, "zero_grad"), "zero_grad", self._around_zero_grad))
        if self.optimizer is None:
            return
        enter(wrapped(defining_class(self.optimizer, "zero_grad"), "zero_grad", self._around_zero_grad))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            enter(removed(self.optimizer.register_step_pre_hook(Hook(self._on_optimizer_step))))
            enter(removed(self.optimizer.register_step_post_hook(Hook(self._on_optimizer_return))))

    def detach(self) -> None:
        """Remove everything; a step in which the optimizer has stepped is over."""
        self._attached.close()
        if self._in_step and (self._optimizer_has_stepped or self.optimizer is None):
            self._end_step()

    def _on_forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.is_grad_enabled() or self.optimizer is None:
            if self._in_step and (self._optimizer_has_stepped or self.optimizer is None):
                self._end_step()
            self._begin_step()
            self._listener.batch(arguments, keywords)
            self._listener.micro_step_begin(self._micro_step)
            self._in_forward = True

    def _on_forward_return(self, *_: Any) -> None:
        if self._in_forward and not torch.is_grad_enabled():
            self._end_forward()
            self._end_micro_step()
            self._listener.tick()

    def _around_backward(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
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
            return result
        finally:
            self._backward_depth -= 1

    def _on_optimizer_step(self, *_: Any) -> None:
        self._begin_step()
        self._listener.optimizer_begin()

    def _on_optimizer_return(self, *_: Any) -> None:
        self._listener.optimizer_end()
        if not self._optimizer_has_stepped:
            self._listener.tick()
        self._optimizer_has_stepped = True

    def _around_zero_grad(self, original: Callable[..., Any], owner: Any, *arguments: Any, **keywords: Any) -> Any:
        is_watched = owner is self.optimizer or owner is self.model or getattr(owner, "module", None) is self.model
        if not is_watched:
            return original(owner, *arguments, **keywords)
        self._listener.zero_grad_begin()
        result = original(owner, *arguments, **keywords)
        self._listener.zero_grad_end()
        if self._in_step and self._has_gradients:
            if not self._optimizer_has_stepped:
                self._listener.tick()
            self._end_step()
        return result

    def _begin_step(self) -> None:
        if not self._in_step:
            self._step += 1
            self._in_step = True
            self._listener.step_begin(self._step)

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


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper (an ``Optimizer`` in name only), or the optimizer itself."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def defining_class(instance: Any, name: str) -> Any:
    """Return the class that defines the method ``name`` of ``instance``."""
    return next(kind for kind in type(instance).__mro__ if name in vars(kind))


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
