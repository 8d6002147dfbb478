"""``loop: pytorch`` with an optimizer that evaluates the loss itself, several times in a step: LBFGS.

``optimizer.step(closure)`` runs the forward and backward passes of all micro-batches as often as it likes, which
depends on values.  Here it makes all its iterations (``max_iter``), and each adds a direction to its history until that
is full.  A training that converges makes fewer iterations and holds at most as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainatomy.training.checkpointing import offloading
from trainatomy.training.optimizer import without_tolerance
from trainatomy.training.precision import autocast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.training.batch import Batch
    from trainatomy.training.observer import Observer
    from trainatomy.training.parallel.spread import Spread
    from trainatomy.workload.schema import Workload


class ClosureSteps:
    """The steps of an optimizer that is given a closure."""

    def __init__(
        self,
        workload: Workload,
        spread: Spread,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Batch],
        observer: Observer,
    ) -> None:
        self._workload = workload
        self._spread = spread
        self._optimizer = without_tolerance(optimizer)
        self._batches = batches
        self._observer = observer
        self._evaluations = 0

    def step(self, kind: str) -> None:
        """Take one optimizer step on the next micro-batches, for a device of this kind.

        The optimizer's own work lies between two evaluations, and after the last one.
        """
        accumulation = self._workload.train.gradient_accumulation_steps
        held = [next(self._batches) for _ in range(accumulation)]
        self._evaluations = 0
        take_step: Any = self._optimizer.step  # its stub wants a closure that returns a float
        take_step(lambda: self._evaluate(held, kind))
        self._observer.optimizer_end()

    def _evaluate(self, held: list[Batch], kind: str) -> torch.Tensor:
        """Compute the gradients of all micro-batches anew, and return their mean loss."""
        observer, count = self._observer, len(held)
        if self._evaluations:
            observer.optimizer_end()
        observer.zero_grad_begin()
        self._optimizer.zero_grad(set_to_none=self._workload.zero_grad_set_to_none)
        observer.zero_grad_end()
        total = torch.zeros((), device=kind)
        for number, batch in enumerate(held):
            observer.micro_step_begin(self._evaluations * count + number)
            with autocast(self._workload.train, kind), offloading(self._workload):
                loss = self._spread.loss(self._spread.module(**batch)) / count
            observer.forward_end()
            loss.backward()
            total += loss.detach()
            observer.micro_step_end(self._evaluations * count + number)
        if self._workload.train.max_grad_norm > 0:
            self._spread.clip(self._workload.train.max_grad_norm)
        self._evaluations += 1
        observer.optimizer_begin()
        return total
