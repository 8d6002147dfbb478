"""The observer of a step whose tape is kept: notes what the loop says, in the words of the simulated run's tape.

A note's place among allocations is exact: the allocator counts them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainatomy.gpu.tape import Note
from trainatomy.gpu.watch import Watch
from trainatomy.training.states import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from trainatomy.gpu.meter import Meter


class Scribe(Watch):
    """A ``Watch`` that also takes notes; of tensors it keeps addresses only."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.notes: list[Note] = []
        self._step = -1
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def loaded(self, model: nn.Module) -> None:
        super().loaded(model)
        self._model = model
        self._note("loaded", weight=addresses(model.parameters()), buffer=addresses(model.buffers()))

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().ready(model, optimizer)
        self._optimizer = optimizer

    def step_begin(self, step: int) -> None:
        super().step_begin(step)
        self._step = step
        self._note("step")

    def micro_step_begin(self, micro_step: int) -> None:
        self._note("forward")

    def forward_end(self) -> None:
        self._note("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        self._note("backward end", gradient=self._gradients())

    def optimizer_begin(self) -> None:
        self._note("optimizer", gradient=self._gradients())

    def optimizer_end(self) -> None:
        self._note("optimizer end", optimizer_state=self._states())

    def zero_grad_begin(self) -> None:
        self._note("zero_grad")

    def zero_grad_end(self) -> None:
        self._note("zero_grad end")

    def step_end(self, step: int) -> None:
        self._note("step end")
        super().step_end(step)

    def _note(self, name: str, **found: list[int]) -> None:
        counted = torch.cuda.memory_stats()
        at = counted.get("allocation.all.allocated", 0) + counted.get("allocation.all.freed", 0)
        self.notes.append(Note(at, name, self._step, found))

    def _gradients(self) -> list[int]:
        assert self._model is not None
        return addresses(parameter.grad for parameter in self._model.parameters() if parameter.grad is not None)

    def _states(self) -> list[int]:
        return addresses(tensors_in(getattr(self._optimizer, "state", {})))


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the storages of ``tensors`` begin on the GPU."""
    return [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.is_cuda]
