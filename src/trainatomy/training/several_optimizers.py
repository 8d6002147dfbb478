"""Optimizers that a user's function makes: one, or several, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.errors import WorkloadError
from trainatomy.training import factory

if TYPE_CHECKING:
    from torch import nn

_KEY = "train.optim"


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers in the place of one: a call goes to all of them in their order, as in a loop."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        """The states of all of them, by the number of the optimizer and the parameter."""
        return {(number, key): value for number, part in enumerate(self.parts) for key, value in part.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Keep nothing: the states are those of the parts."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with each."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of each."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def each_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that a gradient scaler is given one after the other."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def optimizers_of(path: str, model: nn.Module) -> torch.optim.Optimizer:
    """Call a user's function and return its optimizer.

    Args:
        path: ``package.module:make`` or ``path/to/file.py:make``.
        model: The model, which the function gets.

    Raises:
        WorkloadError: There is no such function, it returned no optimizers, or one of them needs a closure.
        FactoryError: Importing or calling it failed.
    """
    make = factory.load(path, _KEY)
    if isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
        message = f"{_KEY}: {path} is a class of optimizers: write optim: {path.replace(':', '.')}"
        raise WorkloadError(message, key=_KEY)
    made = factory.call(make, _KEY, (model,))
    parts = list(made) if isinstance(made, (list, tuple)) else [made]
    if not parts or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        kind = ", ".join(type(part).__name__ for part in parts) or "an empty list"
        raise WorkloadError(f"{_KEY}: {path} must return an optimizer or a list of them, not {kind}", key=_KEY)
    for part in parts:
        closure = inspect.signature(part.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            name = f"{type(part).__module__}.{type(part).__qualname__}"
            message = f"{_KEY}: {path} returned {name}, whose step needs a closure: give the class, optim: {name}"
            raise WorkloadError(message, key=_KEY)
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)
