"""A measurement while it runs: a bar on stderr where somebody looks, a line for each stage where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from trainatomy.measurement.process.reporting import Progress

Tell = Callable[["Progress"], None]


@contextmanager
def following() -> Iterator[Tell]:
    """A function that is told of each progress."""
    paper = Console(stderr=True, highlight=False)
    if not paper.is_terminal:
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[held]}"),
    )
    with Bars(*columns, console=paper, transient=True) as bars:
        yield _on(bars)


def _on(bars: Bars) -> Tell:
    """One bar a run."""
    tasks: dict[str, TaskID] = {}

    def tell(progress: Progress) -> None:
        if progress.run not in tasks:
            tasks[progress.run] = bars.add_task(progress.run, total=None, held="")
        held = "" if progress.device_bytes is None else human_bytes(progress.device_bytes)
        total = progress.steps or None
        bars.update(
            tasks[progress.run],
            description=f"{progress.run} run: {progress.stage}",
            completed=progress.step,
            total=total,
            held=held,
        )

    return tell


def _lines() -> Tell:
    """A line for each stage of each run, once."""
    said: set[tuple[str, str]] = set()

    def tell(progress: Progress) -> None:
        if (progress.run, progress.stage) in said:
            return
        said.add((progress.run, progress.stage))
        held = "" if progress.device_bytes is None else f" ({human_bytes(progress.device_bytes)} on the card)"
        print(f"{progress.run} run: {progress.stage}{held}", file=sys.stderr, flush=True)

    return tell
