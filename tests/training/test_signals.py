"""Events of a loop from the signals of a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainatomy.scripts.signals import ScriptSignals
from trainatomy.training.observer import LoopSignals

STEP = [
    "step_begin",
    "micro_step_begin",
    "forward_end",
    "micro_step_end",
    "optimizer_begin",
    "optimizer_end",
    "step_end",
]


class Written:
    """A listener that writes down which events came, without optimizer steps in which nothing happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def note(*_: Any, **__: Any) -> bool:
            if name == "optimizer_end" and self.events[-1:] == ["optimizer_begin"] and "forward_end" not in self.step:
                self.events.pop()
            elif name in STEP:
                self.events.append(name)
            return True

        return note

    @property
    def step(self) -> list[str]:
        """The events of the step so far."""
        begun = max((at for at, name in enumerate(self.events) if name == "step_begin"), default=0)
        return self.events[begun:]


def plain(optimizer: torch.optim.Optimizer, compute: Callable[[], torch.Tensor]) -> None:
    compute()
    optimizer.step()


def closed(optimizer: torch.optim.Optimizer, compute: Callable[[], torch.Tensor]) -> None:
    optimizer.step(compute)


@pytest.mark.parametrize("take_step", [plain, closed])
@pytest.mark.parametrize("zeroes", ["first", "before backward", "never"])
def test_steps_with_a_closure_have_the_events_of_steps_without(take_step: Any, zeroes: str) -> None:
    written = Written()
    with ScriptSignals(written, 9).attached():  # type: ignore[arg-type]
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())

        def compute() -> torch.Tensor:
            if zeroes == "first":
                optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            if zeroes == "before backward":
                optimizer.zero_grad()
            loss.backward()
            return loss

        for _ in range(3):
            take_step(optimizer, compute)
    assert written.events == STEP * 3


def test_a_closure_that_is_evaluated_twice_is_one_step() -> None:
    written = Written()
    signals = LoopSignals(written)  # type: ignore[arg-type]
    for _ in range(2):
        signals.optimizer_begins()
        for _ in range(2):
            signals.around_zero_grad(lambda *_: None, None)
            signals.forward((), {})
            signals.around_backward(lambda: None)
        signals.optimizer_ends()
    signals.end_step_that_is_over()
    assert written.events == [*STEP[:-1], *STEP[1:], *STEP[:-1], *STEP[1:]]


def test_a_task_between_two_steps_belongs_to_none() -> None:
    written = Written()
    signals = ScriptSignals(written, 9)  # type: ignore[arg-type]
    with signals.attached():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert written.events == STEP[:-1]
        signals.end_step_that_is_over()
        assert written.events == STEP
