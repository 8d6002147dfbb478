"""Writes what the allocation rules plan into the allocation trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import count

import torch

from trainatomy.operators.allocation.plan import Free, Out, Plan, Scratch, Trial
from trainatomy.operators.allocation.workspaces import Workspace
from trainatomy.results.trace import AllocationTrace, Event, PlansTried

Allocate = Callable[[int, str], int]
Hold = Callable[[torch.Tensor, str, int | None], int | None]


class PlanWriter:
    """Writer of plans, with the libraries' decisions that hold for later calls."""

    def __init__(self, trace: AllocationTrace, allocate: Allocate, release: Callable[[int], None], hold: Hold) -> None:
        """Take a trace, and what writes to it.

        Args:
            trace: Allocations so far.
            allocate: Writes a request of some bytes by an operation, and returns its number.
            release: Writes that the allocation of a number is released.
            hold: Writes the allocation of a tensor of an operation, which takes the bytes that are given or its own.
        """
        self._trace = trace
        self._allocate = allocate
        self._release = release
        self._hold = hold
        self._choices = defaultdict[Hashable, int](count().__next__)  # each thread decides for itself
        self._tried = set[Hashable]()

    def write(
        self, plan: Plan, name: str, outputs: Sequence[torch.Tensor], workspaces: Sequence[Workspace] = ()
    ) -> None:
        """Write what a plan says of a call of an operator, then the outputs that it does not mention.

        ``workspaces`` are those that libraries allocate for the kernel alone.
        """
        scratch: list[tuple[str, int]] = []
        for item in plan:
            if isinstance(item, Scratch):
                scratch.append((item.name, number := self._allocate(item.bytes, f"{name} ({item.name})")))
                if item.choice is not None:
                    self._trace.choices[number] = self._decision(item.choice)
            elif isinstance(item, Out):
                if item.number < len(outputs):
                    self._hold(outputs[item.number], name, item.bytes)
            elif isinstance(item, Free):
                found = next(i for i, (key, _) in enumerate(scratch) if key == item.name)
                self._release(scratch.pop(found)[1])
            else:
                self._try(item, name)
        for tensor in outputs:
            self._hold(tensor, name, None)
        for workspace in workspaces:
            self._release(self._allocate(workspace.bytes, f"{name} ({workspace.name})"))
        for _, number in reversed(scratch):
            self._release(number)

    def _decision(self, choice: Hashable) -> int:
        """Return the number of a library's decision; each thread decides for itself, that of autograd too."""
        return self._choices[choice, torch._C._current_graph_task_id() != -1]

    def _try(self, trial: Trial, name: str) -> None:
        """Write what a trial of algorithms allocates, and that the cache is emptied after it."""
        tried = trial.key, torch._C._current_graph_task_id() != -1
        if tried in self._tried:
            return
        self._tried.add(tried)
        if not trial.workspaces:
            return
        number = self._allocate(max(trial.workspaces), f"{name} (trial of cuDNN's plans)")
        self._trace.choices[number] = self._decision(trial.choice)
        self._trace.trials[number] = PlansTried(trial.workspaces, trial.timed)
        self._release(number)
        self._trace.events.append(Event("empty_cache", -1, 0))
