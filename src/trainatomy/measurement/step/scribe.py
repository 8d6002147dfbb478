"""The observer of a step whose tape is kept: notes what the loop says, in the words of the simulated run's tape.

A note's place among allocations is exact: the allocator counts them itself.  Modules are followed during the warm-up
only, so that the steps which are timed cost little more than PyTorch's own record of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainatomy.measurement.process.job import WARM_UP_STEPS
from trainatomy.measurement.step.follow import Follower
from trainatomy.measurement.step.watch import Watch
from trainatomy.measurement.traces.trace import Note
from trainatomy.training.states import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from trainatomy.measurement.device.meter import Meter
    from trainatomy.measurement.process.reporting import Reporter
    from trainatomy.measurement.step.watch import Patience


class Scribe(Watch):
    """A ``Watch`` that also takes notes; of tensors it keeps addresses only."""

    def __init__(
        self,
        meter: Meter,
        *,
        warm_up: int = WARM_UP_STEPS,
        reporter: Reporter | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(meter, warm_up=warm_up, reporter=reporter, patience=patience)
        self.notes: list[Note] = []
        self.followed: list[int] = []
        self._follower: Follower | None = None
        self._trained: list[nn.Parameter] = []
        self._states: list[int] = []
        self._number_of_states = -1
        self._states_move = False
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def loaded(self, model: nn.Module) -> None:
        super().loaded(model)
        self._model = model
        self._note("loaded", **self._model_places())
        self._follower = Follower(model, self._take)
        self._follower.start()

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().ready(model, optimizer)
        self._model, self._optimizer = model, optimizer
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step_begin(self, step: int) -> None:
        super().step_begin(step)
        self._note("step")

    def micro_step_begin(self, micro_step: int) -> None:
        super().micro_step_begin(micro_step)
        first = self.steps == 0 and micro_step == 0
        self._note("forward", **(self._model_places() if first else {}))

    def forward_end(self) -> None:
        super().forward_end()
        self._note("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        super().micro_step_end(micro_step)
        self._note("backward end")

    def optimizer_begin(self) -> None:
        super().optimizer_begin()
        self._note("optimizer", gradient=self._gradients())

    def optimizer_end(self) -> None:
        super().optimizer_end()
        self._note("optimizer end", optimizer_state=self._changed_states())

    def zero_grad_begin(self) -> None:
        self._note("zero_grad")

    def zero_grad_end(self) -> None:
        self._note("zero_grad end")

    def step_end(self, step: int) -> None:
        self._note("step end")
        if self._follower is not None:
            self.followed.append(step)
            if step + 1 >= self.warm_up:
                self._follow_no_longer()
        super().step_end(step)

    def failed(self) -> None:
        """The step raised: note what is there now, while everything that it held is still held."""
        super().failed()
        if self._model is not None:
            states = addresses(tensors_in(getattr(self._optimizer, "state", {})))
            self._note("failed", gradient=self._gradients(), optimizer_state=states)

    def over(self) -> None:
        super().over()
        self._follow_no_longer()

    def _follow_no_longer(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _note(self, name: str, **found: list[int]) -> None:
        self._take(name, found)

    def _take(
        self,
        name: str,
        found: dict[str, list[int]] | None = None,
        module: str = "",
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.notes.append(Note(allocations_and_releases(), name, self.step, found or {}, module, copies))

    def _model_places(self) -> dict[str, list[int]]:
        """Where the model lies; asked again before the first forward, since loops may move it (recurrent layers join
        their weights whenever they are sent to a device)."""
        assert self._model is not None
        return {"weight": addresses(self._model.parameters()), "buffer": addresses(self._model.buffers())}

    def _gradients(self) -> list[int]:
        gradients = [parameter.grad for parameter in self._trained]
        return [gradient.data_ptr() for gradient in gradients if gradient is not None]

    def _changed_states(self) -> list[int]:
        """Where the states lie that the optimizer has not shown yet; nothing while it keeps the tensors that it has."""
        state = getattr(self._optimizer, "state", {})
        number = sum(len(entry) if isinstance(entry, dict) else 1 for entry in state.values())
        if number == self._number_of_states and not self._states_move and self.step >= self.warm_up:
            return []
        found = addresses(tensors_in(state))
        self._states_move = number == self._number_of_states and found != self._states
        self._number_of_states, self._states = number, found
        return found


def allocations_and_releases() -> int:
    """How many of both the allocator has counted.

    Asks the allocator itself: ``torch.cuda.memory_stats`` sorts and flattens its answer, which takes ten times as long.
    """
    counted = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]
    return int(counted["allocated"]) + int(counted["freed"])


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the storages of ``tensors`` begin on the GPU."""
    return [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.is_cuda]
