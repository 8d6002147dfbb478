"""Marks of a loop's phases in the allocation trace, for every loop that is simulated: a workload's and a script's.

The names are those of a measured trace (``measurement.traces.trace.PHASES``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainatomy.simulator.recorder import Recorder
from trainatomy.training.observer import Silent
from trainatomy.training.parallel.deepspeed import engine_tensors
from trainatomy.training.seeds import host_states


class PhaseMarker(Silent):
    """Observer that marks where steps and their phases begin and end, and labels gradients and optimizer states.

    A subclass knows the tensors: it says which are gradients and states, and when operations are written.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._host_states: dict[str, Any] = {}
        self._sizes: list[int] = []
        self._begun_at = 0
        self._operations = recorder.operations

    def gradients(self) -> Iterable[torch.Tensor]:
        """Return the gradients that exist."""
        raise NotImplementedError

    def states(self) -> Iterable[torch.Tensor]:
        """Return the optimizers' states that exist."""
        raise NotImplementedError

    def engines(self) -> Iterable[Any]:
        """Return optimizers that may hold gradients and states in buffers of their own, as DeepSpeed's do."""
        raise NotImplementedError

    def step_begin(self, step: int) -> None:
        """Begin a step."""
        self._recorder.step = step
        self._recorder.mark("step")
        self._set_stage("other")

    def micro_step_begin(self, micro_step: int) -> None:
        """Begin the forward pass of a micro-batch."""
        self._host_states, self._begun_at = host_states(), len(self._recorder.trace.origins)
        self._recorder.mark("forward")
        self._operations.micro_step = micro_step
        self._set_stage("forward")

    def forward_end(self) -> None:
        """End the forward pass: its results that are still held are held for backward."""
        self._recorder.mark("forward end")
        self._note_draws()
        self._set_stage("other")

    def _note_draws(self) -> None:
        """Note where a forward pass drew numbers on the host and allocated more or less often than another.

        The first one does not count: it allocates what is made once.
        """
        drawn = {name for name, state in host_states().items() if self._host_states.get(name, state) != state}
        self._sizes.append(len(self._recorder.trace.origins) - self._begun_at)
        if len(set(self._sizes[1:])) > 1:
            self._recorder.host_draws |= drawn

    def micro_step_end(self, micro_step: int) -> None:
        """Label the gradients."""
        self._label_gradients()
        self._recorder.mark("backward end")

    def optimizer_begin(self) -> None:
        """Begin the optimizer's step."""
        self._label_gradients()
        self._recorder.mark("optimizer")
        self._set_stage("optimizer")

    def optimizer_end(self) -> None:
        """Label the optimizer's states."""
        self._label_states()
        self._recorder.mark("optimizer end")
        self._set_stage("other")

    def zero_grad_begin(self) -> None:
        """Begin to release gradients or fill them with zeros."""
        self._recorder.mark("zero_grad")
        self._operations.stage = "zero_grad"

    def zero_grad_end(self) -> None:
        """End of ``zero_grad``."""
        self._recorder.mark("zero_grad end")
        self._operations.stage = self._recorder.stage

    def step_end(self, step: int) -> None:
        """End a step."""
        self._recorder.mark("step end")

    def _set_stage(self, name: str) -> None:
        self._recorder.stage = self._operations.stage = name

    def _label_gradients(self) -> None:
        self._label(self.gradients(), "gradient")
        self._label_engines()

    def _label_states(self) -> None:
        self._label(self.states(), "optimizer_state")
        self._label_engines()

    def _label_engines(self) -> None:
        for optimizer in self.engines():
            for label, tensors in engine_tensors(optimizer).items():
                self._label(tensors, label)

    def _label(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        for tensor in tensors:
            self._recorder.label(tensor, label)
