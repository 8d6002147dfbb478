"""Measure a training: run it on this machine's GPU, in fresh processes, and put together what they say.

A fresh process each time, because what ran before leaves memory behind: a context, loaded kernels, library workspaces,
cached segments.  Two of them, because recording takes time: the *control run*, in which nothing is recorded, gives
times and totals; the *recorded run* gives the bill.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import parse_version
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.device.visible import require_gpu
from trainatomy.measurement.merging import merged
from trainatomy.measurement.process.hosting import Limit, died, indented
from trainatomy.measurement.process.job import Job, Stacks, warm_up_steps
from trainatomy.measurement.process.reporting import Progress
from trainatomy.measurement.process.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.results.measurement import Measurement
    from trainatomy.workload.schema import Workload

TIMED_STEPS = 8
MOST_STEPS = 100
TIMED_SECONDS = 3.0
"""The control run times at least ``TIMED_STEPS`` steps, and more of them until they took so long together."""
LOG_LINES = 12

__all__ = ["died", "jobs_for", "last_lines", "measure", "require_gpu"]


def measure(
    workload: Workload,
    *,
    trace: Path | str | None = None,
    stacks: Stacks = "none",
    steps: int | None = None,
    components: bool = True,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    sessions: Sessions | None = None,
) -> Measurement:
    """Run ``workload`` on the GPU of this machine and return what it took; out of memory is a result, not an error.

    ``components``: run it a second time, recorded, for the bill; ``steps``: optimizer steps of each run where the
    workload does not say (default: enough for a stable median); ``tape``: a file for the recorded run's stream of
    allocations, with ``stacks`` if wanted; ``time_limit``: seconds for everything; ``progress``: is told where it is
    (default: prints a line to stderr for each stage); ``sessions``: processes that have loaded the libraries already.

    Raises ``DeviceError`` where there is no GPU or the control run's process died or took too long, and whatever error
    the workload itself causes.  Where only the recorded run failed, the result lacks its bill and a note says why.
    """
    tell = progress or _printer()
    check_allocator(workload)
    target = None if trace is None else writable(Path(trace))
    tell(Progress("control", f"starting on {require_gpu()}"))
    jobs = jobs_for(workload, steps, components=components, trace=target, stacks=stacks)
    limit = None if time_limit is None else Limit(time_limit)
    if sessions is None:
        with Sessions() as own:
            return _measured(jobs, own, limit, tell)
    return _measured(jobs, sessions, limit, tell)


def _measured(
    jobs: list[Job], sessions: Sessions, limit: Limit | None, tell: Callable[[Progress], None]
) -> Measurement:
    """The control run, with the bill of the recorded one where there is one."""
    control = sessions.run(jobs[0], limit, tell, more=len(jobs) > 1)
    if len(jobs) == 1:
        return control
    try:
        return merged(control, sessions.run(jobs[1], limit, tell))
    except TrainatomyError as error:
        return replace(control, notes=(*control.notes, f"the recorded run failed, so there is no bill: {error}"))


def jobs_for(
    workload: Workload, steps: int | None, *, components: bool, trace: Path | None = None, stacks: Stacks = "none"
) -> list[Job]:
    """The control run, and the recorded one where it is wanted."""
    mapping = workload.to_mapping()
    exact = workload.steps or steps
    count = exact or warm_up_steps(workload) + TIMED_STEPS
    control = Job(mapping, count, most_steps=0 if exact else MOST_STEPS, seconds=0.0 if exact else TIMED_SECONDS)
    if not components and trace is None:
        return [control]
    return [control, Job(mapping, count, trace, stacks, record=components)]


def check_allocator(workload: Workload) -> None:
    """Raises ``WorkloadError`` for options that the installed PyTorch would refuse, before anything is started."""
    if (installed := version_of("torch")) is not None:
        AllocatorSettings.parse(workload.allocator, parse_version(installed))


def writable(path: Path, option: str = "--trace") -> Path:
    """The absolute path, once it is known that a file can be made there; raises ``WorkloadError``, which names the
    ``option``, where it cannot."""
    target = path.expanduser().absolute()
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.") as probe:
            probe.write(b"x")
            probe.flush()
        if target.is_dir() or (target.exists() and not os.access(target, os.W_OK)):
            raise IsADirectoryError if target.is_dir() else PermissionError
    except OSError as error:
        why = error.strerror or ("it is a folder" if target.is_dir() else "it may not be written")
        raise WorkloadError(f"{option}: {target} cannot be written: {why}. Name another file.") from error
    return target


def _printer() -> Callable[[Progress], None]:
    """Prints each stage once."""
    said: set[tuple[str, str]] = set()

    def tell(progress: Progress) -> None:
        if (progress.run, progress.stage) not in said:
            said.add((progress.run, progress.stage))
            print(Progress(progress.run, progress.stage), file=sys.stderr, flush=True)

    return tell


def last_lines(log: Path) -> str:
    """The end of a log, indented."""
    return indented(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
