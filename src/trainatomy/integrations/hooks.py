"""Find out where a user's training loop is, by hooks on its model and optimizer.

The loop itself is not changed.  Its model and its optimizer carry hooks while it is watched; the functions that every
loop calls (``torch.autograd.backward``, the two ``zero_grad``) are wrapped, and restored at the end.  What their calls
mean is in ``training.signals``.

Without an optimizer (inference), every forward is a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainatomy.training.signals import LoopListener, LoopSignals, removed, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


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

    def __init__(self, model: nn.Module, optimizer: Any, listener: LoopListener) -> None:
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
