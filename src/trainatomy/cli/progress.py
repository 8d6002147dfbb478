"""Live views of long work on stderr: bars with stage, memory and time left on a terminal, lines elsewhere.

A live line for work whose length is not known.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from trainatomy.cli.output import note, say
from trainatomy.measurement.process.job import Progress as RunProgress
from trainatomy.reporters.text.comparison import run_line
from trainatomy.reporters.text.rendering import error_paper
from trainatomy.results.prediction import Plan as ParallelPlan
from trainatomy.results.prediction import total_rate
from trainatomy.runs.plan import Finished, Plan, RunObserver
from trainatomy.search.explore import Observer
from trainatomy.search.outcomes import Outcome
from trainatomy.units import human_bytes, many

if TYPE_CHECKING:
    Tell = Callable[[RunProgress], None]


LINE_SECONDS = 5.0
"""Time between two lines of progress where there is no terminal."""


@contextmanager
def lines(text: Callable[[], str]) -> Iterator[None]:
    """Print what ``text`` returns every few seconds, unless it is empty."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(LINE_SECONDS):
            if line := text():
                say(line)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def live_line(paper: Console) -> Progress:
    """Return a line that shows what is done, for how long, and how much host memory it takes."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), HostMemoryColumn())
    return Progress(*columns, console=paper, transient=True, refresh_per_second=4)


class HostMemoryColumn(ProgressColumn):
    """The host memory that this process holds."""

    max_refresh = 1.0

    def render(self, task: Task) -> Text:
        held = resident_bytes()
        return Text("" if held is None else f"{human_bytes(held)} of host memory", style="dim")


def resident_bytes() -> int | None:
    """Return the resident memory of this process, None where the system does not tell it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def follow_measurement() -> Iterator[Tell]:
    """Yield a function that shows the progress of one measurement."""
    paper = error_paper()
    if not paper.is_terminal:
        stages = _Stages()
        with lines(lambda: stages.last):
            yield stages.tell
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[held]}"),
    )
    with Progress(*columns, console=paper, transient=True) as bars:
        yield _update_bars(bars)


def _update_bars(bars: Progress) -> Tell:
    """Return a function that shows one bar per run."""
    tasks: dict[str, TaskID] = {}

    def tell(progress: RunProgress) -> None:
        if progress.run not in tasks:
            tasks[progress.run] = bars.add_task(progress.run, total=None, held="")
        held = "" if progress.device_bytes is None else human_bytes(progress.device_bytes)
        bars.update(
            tasks[progress.run],
            description=f"{progress.run} run: {progress.stage}",
            completed=progress.step,
            total=progress.steps or None,
            held=held,
        )

    return tell


class _Stages:
    """Prints each stage of each run once; ``last`` is a line about the steps of the one at work."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, str]] = set()
        self.last = ""

    def tell(self, progress: RunProgress) -> None:
        """Take in the progress of a run."""
        held = "" if progress.device_bytes is None else f" ({human_bytes(progress.device_bytes)} on the GPU)"
        if (progress.run, progress.stage) not in self._printed:
            self._printed.add((progress.run, progress.stage))
            say(f"{progress.run} run: {progress.stage}{held}")
        steps = f" of at most {progress.steps}" if progress.steps else ""
        done = f", step {progress.step}{steps}" if progress.step else ""
        self.last = f"{progress.run} run: {progress.stage}{done}{held}"


class SearchProgress(Observer):
    """Line with the number of executed candidates and the best one so far; a context manager."""

    def __init__(self, name: str) -> None:
        self._paper = error_paper()
        self._line = live_line(self._paper) if self._paper.is_terminal else None
        self._task = TaskID(0)
        self._name = name
        self._text = f"{name}: starting"
        self._exits = ExitStack()

    def __enter__(self) -> SearchProgress:
        if self._line is None:
            self._exits.enter_context(lines(lambda: self._text))
        else:
            self._task = self._line.add_task(self._text, total=None)
            self._exits.enter_context(self._line)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def executed(self, count: int, best: Outcome | None) -> None:
        """Show the number of executed candidates and the best one."""
        text = f"{self._name}: {many(count, 'candidate')} executed"
        rate = total_rate(best.prediction) if best is not None else None
        if best is not None and rate is not None:
            text += f", best so far batch {best.point[0]} with {rate:.3g} samples/s (Ctrl-C stops and shows it)"
        self._show(text)

    def compiling(self) -> None:
        """Show that the best candidate is compiled."""
        self._show(f"{self._name}: compiling the best settings (Ctrl-C leaves it out)")

    def _show(self, text: str) -> None:
        self._text = text
        if self._line is not None:
            self._line.update(self._task, description=text)


class ComparisonProgress(RunObserver):
    """Bar over all runs of a comparison, with a line for each run that ended.

    Use it as a context manager; ``finished_runs`` holds the runs that ended.
    """

    def __init__(self) -> None:
        self.finished_runs: list[Finished] = []
        self._paper = error_paper()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._plan = Plan((), "")
        self._current = ""
        self._stage = "predicting"
        self._exits = ExitStack()

    def __enter__(self) -> ComparisonProgress:
        if not self._paper.is_terminal:
            self._exits.enter_context(lines(self._line))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def planned(self, plan: Plan) -> None:
        """Start the bar, on a terminal."""
        self._plan = plan
        if self._paper.is_terminal:
            columns = (
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Progress(*columns, console=self._paper, transient=True)
            self._task = self._bar.add_task("", total=len(plan))
            self._exits.enter_context(self._bar)

    def starting(self, row: int, repeat: int) -> None:
        """Name the run beside the bar."""
        self._current = self._name(row, repeat)
        self._describe(self._current)

    def progress(self, progress: RunProgress) -> None:
        """Show the stage of the run beside the bar."""
        self._describe(f"{self._current}: {progress}")

    def _line(self) -> str:
        """Return what is done, what runs, and the best so far."""
        if not self._plan.workloads:
            return self._stage
        measured = [run for run in self.finished_runs if run.measurement and run.measurement.samples_per_second]
        best = max(measured, key=self._rate, default=None)
        text = f"{len(self.finished_runs)} of {many(len(self._plan), 'run')} done; {self._stage}"
        if best is not None:
            text += f"; best so far {self._name(best.row, best.repeat)} with {self._rate(best):.3g} samples/s"
        return text

    def _rate(self, run: Finished) -> float:
        rate = run.measurement.samples_per_second if run.measurement is not None else None
        return (rate or 0.0) * ParallelPlan.of(self._plan.workloads[run.row].to_mapping()).data_parallel_size

    def finished(self, run: Finished) -> None:
        """Print a line and advance the bar."""
        self.finished_runs.append(run)
        self._print(run_line(self._name(run.row, run.repeat), run.measurement, run.error, run.from_record))
        if run.unsaved:
            self._print(f"  not recorded: {run.unsaved}")
        if self._bar is not None:
            self._bar.update(self._task, advance=1)

    def note(self, message: str) -> None:
        """Print a note, except for records that were not written, which ``finished`` has reported."""
        if not message.startswith("a run was not recorded"):
            note(message)

    def _describe(self, text: str) -> None:
        self._stage = text
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._paper.print(line, markup=False)
        else:
            say(line)

    def _name(self, row: int, repeat: int) -> str:
        name = self._plan.workloads[row].name or f"training {row + 1}"
        return f"{name} ({repeat + 1} of {self._plan.repeats})" if self._plan.repeats > 1 else name
