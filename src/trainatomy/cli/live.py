"""A live line for work whose length is not known."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainatomy.units import human_bytes


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
