"""A live view of a watched training on a terminal: step, GPU memory, time of a step, time left."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trainatomy.reporters.text.rendering import error_paper
from trainatomy.units import human_bytes, seconds

if TYPE_CHECKING:
    from trainatomy.measurement.step.recorder import AllocatorCounters

_BETWEEN = 0.25
"""Seconds between two updates, so that short steps are not slowed down."""


class LiveView:
    """A line on stderr that follows the steps of a training; nothing where stderr is no terminal."""

    def __init__(self, name: str, steps: int | None = None, paper: Console | None = None) -> None:
        """Prepare the view.

        Args:
            name: Name of the training.
            steps: Optimizer steps in total, for the time left; None: not known.
            paper: Where to draw (default: stderr).
        """
        self._name, self._steps = name, steps
        self._paper = paper or error_paper()
        self._bars: Progress | None = None
        self._task = TaskID(0)
        self._updated = self._began = 0.0
        self._first = 0

    def start(self) -> None:
        """Begin to draw."""
        if not self._paper.is_terminal:
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[held]}", markup=False),
        )
        self._bars = Progress(*columns, console=self._paper, transient=True, auto_refresh=False)
        self._task = self._bars.add_task(self._name, total=self._steps, held="")
        self._bars.start()

    def step_ended(self, steps: int, counters: AllocatorCounters) -> None:
        """Show a step that ended, unless the last update was a moment ago."""
        now = time.monotonic()
        if self._bars is None or now - self._updated < _BETWEEN:
            return
        if not self._updated:
            self._began, self._first = now, steps
        self._updated = now
        held = f"peak {human_bytes(counters.peak_bytes)} allocated"
        if steps > self._first:
            held += f", {seconds((now - self._began) / (steps - self._first))} per step"
        with suppress(OSError, ValueError):  # stderr was closed: no reason to end a training
            self._bars.update(self._task, completed=steps, held=held)
            self._bars.refresh()

    def stop(self) -> None:
        """Remove the line."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
