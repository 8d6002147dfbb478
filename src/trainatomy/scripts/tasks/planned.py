"""Tasks of a training besides its steps: which its configuration plans, and which of them were executed.

A dry run stops long before the first evaluation or checkpoint comes.  What the configuration of a framework says will
come is executed once after the last step, where the framework's own loop would do it, so that its memory is in the
prediction.  What cannot be executed is listed with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from trainatomy.results.script import LITTLE_LEFT, ScriptTask, TaskKind

if TYPE_CHECKING:
    from trainatomy.scripts.observer import ScriptObserver
    from trainatomy.scripts.signals import ScriptSignals
    from trainatomy.scripts.standins.notes import StandIns
    from trainatomy.simulator.recorder import Recorder

SECONDS = 60.0
"""Time for the batches of one evaluation."""
_FEWEST = 3
_MOST_UNLIKE = 32
"""Batches of an evaluation that are executed if all have the same shapes, and if they differ."""


class Tasks:
    """The tasks of a script's training.

    Args:
        stand_ins: Puts replacements in place.
        observer: Observer of the loop.
        signals: Signals of the loop.
        looks_ahead: Execute planned tasks after the last step.

    Attributes:
        total_steps: Optimizer steps of all trainers so far, None where no configuration says it.
    """

    def __init__(
        self, stand_ins: StandIns, observer: ScriptObserver, signals: ScriptSignals, *, looks_ahead: bool
    ) -> None:
        self.stand_ins, self.observer = stand_ins, observer
        self._signals, self._looks_ahead = signals, looks_ahead
        self._tasks: dict[TaskKind, ScriptTask] = {}
        self._were_due = False
        self.total_steps: int | None = None
        self._trainer = self._done = self._before = 0

    def of_trainer(self, trainer: Any, done: int, total: int | None) -> None:
        """Note how many steps a trainer has done, and will have done at its end; a script may have several in turn."""
        if id(trainer) != self._trainer or done < self._done:
            self._trainer, self._before = id(trainer), self._before + self._done
        self._done = done
        self.total_steps = None if total is None else self._before + total

    def listed(self) -> tuple[ScriptTask, ...]:
        """Return the tasks that were planned or executed, in the order in which the training comes to them."""
        return tuple(sorted(self._tasks.values(), key=lambda task: (task.after is None, task.after or 0, task.kind)))

    @property
    def steps(self) -> int:
        """Steps that are over."""
        return self._signals.finished

    def become_due(self) -> bool:
        """Return, once, that the last step is over: planned tasks are executed now."""
        if self._were_due or not self._looks_ahead or not self._signals.is_done():
            return False
        self._were_due = True
        return True

    def plan(self, kind: TaskKind, after: int | None, reason: str = "") -> bool:
        """Note that a task comes after a step; return whether it has not been executed since the first step.

        Without a step it comes after the training, and is not executed, for the ``reason``.
        """
        task = self._tasks.get(kind)
        if task is not None and task.executed_after:
            return False
        if task is None or task.executed_after == 0:
            self._tasks[kind] = ScriptTask(kind, after, reason=reason)
        return True

    def execute(self, kind: TaskKind, run: Callable[[], Any]) -> None:
        """Execute a planned task; if that fails, the training goes on without it."""
        try:
            with self.observer.looking_ahead():
                run()
        except Exception as error:  # whatever the script's own code raises
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._tasks[kind] = replace(self._tasks[kind], executed_after=None, reason=reason)

    @contextmanager
    def executing(self, kind: TaskKind, after: int | None = None) -> Iterator[None]:
        """Execute a task in the block, which belongs to no step."""
        self._signals.end_step_that_is_over()
        self.observer.task_begin(kind)
        try:
            yield
        finally:
            self.observer.task_end(kind)
        self._note(kind, after)

    @contextmanager
    def evaluating(self, batches: int | None) -> Iterator[EvaluationBatches]:
        """Evaluate in the block, with this many batches (None: nobody knows)."""
        followed = EvaluationBatches(self.observer.recorder, batches)
        with self.executing("evaluation"):
            yield followed
        task = self._tasks["evaluation"]
        self._tasks["evaluation"] = replace(
            task,
            batches=task.batches + followed.count,
            of=None if batches is None else (task.of or 0) + batches,
            left_bytes=task.left_bytes + followed.left_bytes,
        )

    def _note(self, kind: TaskKind, after: int | None) -> None:
        """Note that a task was executed; one that nobody planned comes here by itself."""
        task = self._tasks.get(kind, ScriptTask(kind, self.steps if after is None else after))
        self._tasks[kind] = replace(task, executed_after=self.steps, reason="")


class EvaluationBatches:
    """Follows the batches of an evaluation, and says when further ones show nothing new.

    Args:
        recorder: Recorder of the run.
        of: Number of batches, None where nobody knows.

    Attributes:
        count: Batches that were executed.
    """

    def __init__(self, recorder: Recorder, of: int | None) -> None:
        self._trace, self._of = recorder.trace, of
        self._seen = len(self._trace.events)
        self._held: dict[int, int] = {}
        self._totals: list[int] = []
        self._shapes: set[Any] = set()
        self._began = time.monotonic()
        self.count = 0

    def ended(self, batch: Any) -> None:
        """Note that a batch was evaluated, and what it left."""
        self.count += 1
        self._shapes.add(tuple(one.shape for one in tree_leaves(batch) if hasattr(one, "shape")))
        for event in self._trace.events[self._seen :]:
            if event.action == "alloc":
                self._held[event.allocation] = event.bytes
            elif event.action == "free":
                self._held.pop(event.allocation, None)
        self._seen = len(self._trace.events)
        self._totals.append(sum(self._held.values()))

    @property
    def left_bytes(self) -> int:
        """Bytes that the batches which were left out would keep."""
        if self._of is None or self.count >= self._of or len(self._totals) < _FEWEST:
            return 0
        return self._growth() * (self._of - self.count)

    def is_enough(self) -> bool:
        """Return whether further batches show nothing new: they are like those before and keep little, or take long."""
        if time.monotonic() - self._began > SECONDS:
            return True
        if self.count < (_FEWEST if len(self._shapes) == 1 else _MOST_UNLIKE):
            return False
        return (self._growth() if self._of is None else self.left_bytes) <= LITTLE_LEFT

    def _growth(self) -> int:
        """Return the bytes that each batch keeps, by the last two."""
        before, last = self._totals[-2:]
        return max(0, last - before)
