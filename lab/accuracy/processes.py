"""Processes that each measure one row: fresh ones, or forks of one that has imported the libraries.

``can_fork`` lists the trainings that a fork measures like a fresh process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.process.job import (
    NVML_CHECK,
    Job,
    LogTail,
    from_plain,
    needs_bitsandbytes,
    set_environment,
    to_plain,
)
from trainatomy.measurement.process.server import preload

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.results.measurement import Measurement

__all__ = [
    "NVML_CHECK",
    "Forked",
    "Process",
    "Running",
    "Started",
    "can_fork",
    "execute",
    "fork",
    "fork_and_run",
    "last_lines",
    "preload",
    "preload_for_forks",
    "read_result",
    "start",
    "write_result",
]


INITIALISES_CUDA = ("torchao",)
"""Libraries whose import initialises CUDA, after which no fork can use the GPU."""


def preload_for_forks() -> None:
    """Import what trainings need, without ``INITIALISES_CUDA``, for processes that only fork afterwards.

    Raises:
        SystemExit: If importing the others initialised CUDA.
    """
    for name in INITIALISES_CUDA:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    if not preload():
        raise SystemExit(
            "importing the libraries initialised CUDA, so that no fork can use the GPU: uninstall the last one"
        )


def can_fork(job: Job) -> bool:
    """Return whether a fork of a process that has loaded the libraries measures what a fresh process would.

    Importing PyTorch and transformers takes seconds.  A fork saves them and changes no figure, because CUDA is
    initialised in the child only.  Not so with allocator options, which PyTorch reads when it is loaded, and with
    bitsandbytes, which asks CUDA about the GPU when it is imported.
    """
    return hasattr(os, "fork") and not job.workload.get("allocator") and not needs_bitsandbytes(job.workload)


class Process(Protocol):
    """A running process; ``status`` is ``None`` until it ends, then its exit code, negative for a signal."""

    def status(self) -> int | None: ...
    def kill(self) -> None: ...


@dataclass(slots=True)
class Forked:
    """A child of this process."""

    pid: int
    _status: int | None = None

    def status(self) -> int | None:
        """Return the exit code once it has ended."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        """Stop it at once and wait for its end."""
        if self.status() is None:
            os.kill(self.pid, 9)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass(slots=True)
class Started:
    """A fresh process."""

    process: subprocess.Popen[bytes]

    def status(self) -> int | None:
        """Return the exit code once it has ended."""
        return self.process.poll()

    def kill(self) -> None:
        """Stop it at once and wait for its end."""
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Running:
    """A process with its result file, its log, and its start (seconds of ``time.monotonic``)."""

    name: str
    process: Process
    result: Path
    log: Path
    alone: bool
    began: float = field(default_factory=time.monotonic)


def start(job: Job, description: Path, result: Path, log: Path) -> Started:
    """Measure ``job`` in a fresh process, which reads it from the file ``description``."""
    description.write_text(job.to_json(), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != NVML_CHECK}
    set_environment(environment, job.workload.get("allocator", ""))
    with log.open("wb") as output:
        return Started(
            subprocess.Popen(
                [sys.executable, __file__, str(description), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )
        )


def fork(job: Job, result: Path, log: Path, prepare: Callable[[], None] | None = None) -> Forked:
    """Measure ``job`` in a child of this process, which calls ``prepare`` first."""

    def run() -> None:
        if prepare is not None:
            prepare()
        execute(job, result)

    return fork_and_run(run, log)


def fork_and_run(run: Callable[[], None], log: Path) -> Forked:
    """Call ``run`` in a child of this process, whose output goes to ``log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    return Forked(pid) if pid else _child(run, log)


def _child(run: Callable[[], None], log: Path) -> NoReturn:
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        os.environ.pop(NVML_CHECK, None)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def execute(job: Job, result: Path) -> None:
    """Run ``job`` in this process and write its measurement, or the error that took its place, to ``result``."""
    from trainatomy.measurement.step import runner  # imports torch, whose allocator reads the environment

    try:
        outcome: Measurement | TrainatomyError = runner.run(job)
    except TrainatomyError as error:
        outcome = error
    write_result(result, outcome)


def write_result(path: Path, result: Measurement | TrainatomyError) -> None:
    """Write a measurement, or the error that took its place, as JSON, atomically."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(to_plain(result)), encoding="utf-8")
    draft.replace(path)


def read_result(path: Path) -> Measurement:
    """Read what ``write_result`` wrote; raise the error if it is one."""
    return from_plain(json.loads(path.read_text(encoding="utf-8")))


def last_lines(log: Path) -> str:
    """Return the end of a log, indented."""
    return LogTail(log.read_text(encoding="utf-8", errors="replace").splitlines()).text()


if __name__ == "__main__":
    execute(Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
