"""Earlier runs of a training with other optimizers, whose micro-batches this run need not execute.

The micro-batches of a training do not depend on its optimizer.  A run that began as an earlier one did, to the last
event of its first micro-batch, therefore copies the others from it: the further ones of the first step, and the first
one of the second step, which it would otherwise execute to see whether they repeat.  What refers to anything that was
made after the first micro-batch (by the optimizer, for example) is not copied, but executed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator.micro_batches import FIRST, OLDER, Template, Window


@dataclass(frozen=True, slots=True)
class Beginning:
    """State of a run when its first micro-batch was over: its trace, and the operators that it ran."""

    events: list[Event]
    origins: list[Origin]
    marks: list[Mark]
    labels: dict[int, str]
    choices: dict[int, int]
    functions: list[Any]
    shapes: Any

    @classmethod
    def of(cls, trace: AllocationTrace, window: Window) -> Beginning:
        """Return the beginning of the run whose first micro-batch is over."""
        parts = list(trace.events), list(trace.origins), list(trace.marks), dict(trace.labels), dict(trace.choices)
        return cls(*parts, window.functions, window.shapes)


@dataclass(frozen=True, slots=True)
class RememberedRun:
    """A run that may be repeated.

    Attributes:
        key: What tells its training from others, except for what shows in how a run begins, and for the optimizer.
        beginning: What it did first.
        first: The first micro-batch of its second step; None if it cannot be copied.
        further: A further micro-batch of its first step, which repeats; None if there is none.
    """

    key: str
    beginning: Beginning
    first: Template | None
    further: Template | None


@dataclass(frozen=True, slots=True)
class Recollections:
    """The runs that this process remembers, for a run of the training with this key.

    Attributes:
        runs: The runs, the one that was used last at the end.
        key: See ``RememberedRun``.
    """

    runs: deque[RememberedRun]
    key: str

    def recall(self, beginning: Beginning) -> RememberedRun | None:
        """Return the earlier run that began in this way."""
        for place, run in enumerate(self.runs):
            if run.key == self.key and run.beginning == beginning:
                del self.runs[place]
                self.runs.append(run)
                return run
        return None

    def remember(self, beginning: Beginning, first: Template | None, further: Template | None) -> None:
        """Remember a run; the one that was not used for the longest time makes room for it."""
        both = [None if one is None or not _is_independent(one, beginning) else one for one in (first, further)]
        if any(both):
            self.runs.append(RememberedRun(self.key, beginning, *both))


def _is_independent(template: Template, beginning: Beginning) -> bool:
    """Return whether a micro-batch refers to nothing that was made after the beginning, except for its own."""
    start, made = template.window.of_first.start, len(beginning.origins)
    names = {name for names in template.outputs for name in names} | {
        entry[1] for entry in template.entries if entry[0] != "mark"
    }
    choices = {entry[-1] for entry in template.entries if entry[0] == "alloc"} - {None}
    older = (number + (start if kind == FIRST else 0) for kind, number in names if kind in (FIRST, OLDER))
    return choices <= set(beginning.choices.values()) and all(number < made for number in older)
