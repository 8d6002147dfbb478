"""The sessions of a measurement, or of many: jobs that may be forks share a process that has loaded the libraries."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.forks import can_fork
from trainatomy.measurement.process.hosting import Host, Limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.measurement.process.job import Job
    from trainatomy.measurement.process.reporting import Progress
    from trainatomy.results.measurement import Measurement

SESSION = (sys.executable, "-m", "trainatomy.measurement.process.session")


class Sessions:
    """Runs jobs, each in a process that is new to CUDA; what it started ends with this context.

    The first job that has company, by ``more`` or by ``lasting``, starts a session that forks.  It stays for the jobs
    that follow until one of them has it stopped.  Where its forks could not use the GPU, every job has its own process.
    ``lasting``: many measurements will follow.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        self._lasting = lasting
        self._forking: Host | None = None
        self._useless = False
        self._ending = ExitStack()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end(*raised)

    def run(
        self, job: Job, limit: Limit | None, tell: Callable[[Progress], None], *, more: bool = False
    ) -> Measurement:
        """What ``Host.run`` returns and raises. ``more``: a job of the same kind will follow this one."""
        if can_fork(job) and self._ready(limit, start=more or self._lasting):
            assert self._forking is not None
            try:
                return self._forking.run(job, limit, tell)
            except (DeviceError, KeyboardInterrupt):
                self._end(*sys.exc_info())
                raise
        with Host(SESSION, str(job.workload.get("allocator", ""))) as host:
            return host.run(job, limit, tell)

    def _ready(self, limit: Limit | None, *, start: bool) -> bool:
        """Whether there is a session whose forks can use the GPU; with ``start`` one is started where there is none."""
        if self._forking is None and start and not self._useless:
            self._forking = self._ending.enter_context(Host([*SESSION, "--fork"], ""))
            if not self._forking.is_ready(limit):
                self._end(None, None, None)
                self._useless = True
        return self._forking is not None

    def _end(self, *raised: object) -> None:
        self._forking = None
        self._ending.__exit__(*raised)  # type: ignore[arg-type]
