"""Executed trainings that a process keeps, so that what several predictions have in common is executed once.

An execution serves all GPUs on which the training does the same, whatever their allocator is
set to (``simulator/cards.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU
    from trainatomy.simulator.simulation import Execution, Simulation
    from trainatomy.workload.schema import Workload

Made = TypeVar("Made")

MOST_EVENTS = 1_000_000
"""Events of the traces that are kept at once, some 200 MB; BERT's training has 10,000."""


class Executions:
    """Executions that were used last, by what is equal for trainings that may share one.

    Args:
        gpus: GPUs on which trainings will be predicted.
    """

    def __init__(self, gpus: Collection[GPU] = ()) -> None:
        self._gpus = gpus
        self._kept: OrderedDict[str, list[Execution]] = OrderedDict()
        self._made: dict[str, Any] = {}

    def simulation(
        self, workload: Workload, key: str, execute: Callable[[Collection[GPU]], Execution], *, is_shared: bool
    ) -> Simulation:
        """Return the simulation of a training, which is executed unless an execution serves it.

        Args:
            workload: The training.
            key: What is equal for trainings that may share an execution.
            execute: Executes it, to serve other GPUs, too.
            is_shared: Whether it may serve others.
        """
        gpu, before = workload.resolve_gpu(), self._kept.setdefault(key, [])
        self._kept.move_to_end(key)
        for execution in before:
            if (found := execution.on(workload, gpu)) is not None:
                return found
        others = [each for each in self._gpus if is_shared and not any(one.serves(each) for one in before)]
        before.append(execute(others))
        self._drop_oldest()
        return simulation_of(before[-1], workload)

    def value(self, key: str, make: Callable[[], Made]) -> Made:
        """Return what was made under a key, or make it."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def _drop_oldest(self) -> None:
        events = sum(len(one.trace.events) for kept in self._kept.values() for one in kept)
        while events > MOST_EVENTS and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            events -= sum(len(one.trace.events) for one in dropped)


def simulation_of(execution: Execution, workload: Workload) -> Simulation:
    """Return the simulation of a training that was just executed."""
    found = execution.on(workload, workload.resolve_gpu())
    assert found is not None
    return found


_EXECUTIONS: ContextVar[Executions | None] = ContextVar("_EXECUTIONS", default=None)


def executions() -> Executions | None:
    """Return the executions that are kept; None: none are."""
    return _EXECUTIONS.get()


def keep_executions(gpus: Collection[GPU] = ()) -> None:
    """Keep executions from now on, in a process that predicts on these GPUs."""
    _EXECUTIONS.set(Executions(gpus))


@contextmanager
def executions_kept(gpus: Collection[GPU] = ()) -> Iterator[None]:
    """Keep executions in the block, which predicts on these GPUs."""
    token = _EXECUTIONS.set(Executions(gpus))
    try:
        yield
    finally:
        _EXECUTIONS.reset(token)
