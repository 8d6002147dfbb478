"""Find out from outside where a training loop is: what somebody's own loop tells an observer without knowing it.

Nothing of the loop is replaced.  Its model and its optimizer carry hooks while it is watched; the functions that every
loop calls (``torch.autograd.backward``, the two ``zero_grad``) are wrapped, and handed back at the end:

============================  =====================================================
a forward pass begins         hook of the outermost model, with gradients enabled
its loss is there             ``torch.autograd.backward`` is called (``loss.backward()`` calls it)
backward is over              it returns
the optimizer's step          the hooks that ``torch.optim.Optimizer`` has for it
gradients are zeroed          ``zero_grad`` of the model or the optimizer
a step is over                gradients are zeroed after a backward, or the next forward follows an optimizer's step
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


class Listener(Observer, Protocol):
    """An observer that is also shown what the model is given, and told of the loop's ticks."""

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """The model is about to be called with these; keep no tensor of them."""

    def tick(self) -> None:
        """The work of a step has been handed to the GPU."""


class Tap:
    """A hook that belongs to one object: a copy or a pickle of it does nothing, so that a watched model can be copied
    and saved."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        self._function(*arguments, **keywords)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _silent, ()


def _silent() -> Callable[..., None]:
    return nothing


def nothing(*arguments: Any, **keywords: Any) -> None:
    """What a copied hook does."""


class Signals:
    """Listens to the loop of one ``model`` and ``optimizer`` from ``attach`` to ``detach`` and calls ``listener``."""

    def __init__(self, model: nn.Module, optimizer: Any, listener: Listener) -> None:
        self.model = model
        self.optimizer = innermost(optimizer)
        self._listener = listener
        self._attached = ExitStack()
        self._step = -1
        self._micro_step = 0
        self._in_step = self._in_forward = self._stepped = self._has_gradients = False
        self._backward_depth = 0

    def attach(self) -> None:
        """Put the hooks where they belong."""
        hook = self._attached.enter_context
        hook(removed(self.model.register_forward_pre_hook(Tap(self._forward_begins), prepend=True, with_kwargs=True)))
        hook(removed(self.model.register_forward_hook(Tap(self._forward_returns), always_call=True)))
        hook(wrapped(torch.autograd, "backward", self._backward))
        hook(wrapped(definer(self.model, "zero_grad"), "zero_grad", self._zero_grad))
        if self.optimizer is None:
            return
        hook(wrapped(definer(self.optimizer, "zero_grad"), "zero_grad", self._zero_grad))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            hook(removed(self.optimizer.register_step_pre_hook(Tap(self._optimizer_begins))))
            hook(removed(self.optimizer.register_step_post_hook(Tap(self._optimizer_ends))))

    def detach(self) -> None:
        """Take them away again; a step that the optimizer has made is over."""
        self._attached.close()
        if self._in_step and (self._stepped or self.optimizer is None):
            self._end_step()

    # -- what the hooks say --------------------------------------------------------------------------------------------

    def _forward_begins(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        training = torch.is_grad_enabled()
        if training or self.optimizer is None:
            if self._in_step and (self._stepped or self.optimizer is None):
                self._end_step()
            self._begin_step()
            self._listener.batch(arguments, keywords)
            self._listener.micro_step_begin(self._micro_step)
            self._in_forward = True

    def _forward_returns(self, *_: Any) -> None:
        if self._in_forward and not torch.is_grad_enabled():
            self._end_forward()
            self._end_micro_step()
            self._listener.tick()

    def _backward(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """``torch.autograd.backward``; reentrant checkpointing calls it again inside."""
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

    def _optimizer_begins(self, *_: Any) -> None:
        self._begin_step()
        self._listener.optimizer_begin()

    def _optimizer_ends(self, *_: Any) -> None:
        self._listener.optimizer_end()
        if not self._stepped:
            self._listener.tick()
        self._stepped = True

    def _zero_grad(self, original: Callable[..., Any], owner: Any, *arguments: Any, **keywords: Any) -> Any:
        ours = owner is self.optimizer or owner is self.model or getattr(owner, "module", None) is self.model
        if not ours:
            return original(owner, *arguments, **keywords)
        self._listener.zero_grad_begin()
        result = original(owner, *arguments, **keywords)
        self._listener.zero_grad_end()
        if self._in_step and self._has_gradients:
            if not self._stepped:
                self._listener.tick()
            self._end_step()
        return result

    # -- what follows from it ------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if not self._in_step:
            self._step += 1
            self._in_step = True
            self._listener.step_begin(self._step)

    def _end_step(self) -> None:
        self._listener.step_end(self._step)
        self._in_step = self._in_forward = self._stepped = self._has_gradients = False
        self._micro_step = 0

    def _end_forward(self) -> None:
        if self._in_forward:
            self._listener.forward_end()
            self._in_forward = False

    def _end_micro_step(self) -> None:
        self._listener.micro_step_end(self._micro_step)
        self._micro_step += 1


def innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper (which is an ``Optimizer`` in name only), or itself."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def definer(instance: Any, name: str) -> Any:
    """The class that defines the method ``name`` of ``instance``."""
    return next(kind for kind in type(instance).__mro__ if name in vars(kind))


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    """Remove a hook at the end."""
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Let ``around(original, ...)`` be called in place of a function of a module or class.

    Who wraps it as well meanwhile keeps a working function: ours then passes everything on once this is over.
    """
    original = vars(owner)[name]
    listening = True

    @functools.wraps(original)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        if listening:
            return around(original, *arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        listening = False
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)
