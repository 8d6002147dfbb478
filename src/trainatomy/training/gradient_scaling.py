"""Steps that PyTorch's gradient scaling lets an optimizer take, and those that it skips.

``GradScaler`` starts with a scale of 65,536 and skips the step of an optimizer where a scaled gradient is infinite or
NaN in float16; each skipped step halves the scale.  An optimizer that unscales inside its kernel
(``_step_supports_amp_scaling``, the fused ones) is called in either case.
Source: torch/amp/grad_scaler.py (``_maybe_opt_step``), torch 2.9-2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


class CountedSteps:
    """Count of the first steps that are skipped, before one is taken.

    Attributes:
        count: Their number; None where gradient scaling decides about no step.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._taken = False

    def decided(self, taken: bool) -> None:
        """Count a decision."""
        self._taken = self._taken or taken
        self.count = (self.count or 0) + (not self._taken)


@contextlib.contextmanager
def following_scaled_steps(
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    decided: Callable[[bool], None] = lambda taken: None,
) -> Iterator[None]:
    """Follow the steps that gradient scaling may skip.

    Args:
        around: Makes a context in which each of them runs.
        decided: Called after each decision, with whether the step was taken.
    """
    original = torch.amp.GradScaler._maybe_opt_step

    def follow(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        taken = False

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            taken = True
            with around():
                return optimizer.step(*args, **kwargs)

        found = original(scaler, SimpleNamespace(step=step), state, *args, **kwargs)  # type: ignore[arg-type]
        decided(taken)
        return found

    with mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", follow):
        yield
