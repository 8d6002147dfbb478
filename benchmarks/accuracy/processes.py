"""Processes that each measure one row: started afresh, or forked from one that has imported the libraries.

A fork saves the seconds that importing PyTorch and transformers takes.  It measures what a fresh process measures,
because CUDA is initialised in the child only, and because what would make a difference is kept out of forks: other
allocator options (PyTorch reads them when it is loaded) and bitsandbytes (which asks CUDA about the card when it is
imported).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from trainatomy.gpu.job import Job, set_environment
from trainatomy.gpu.worker import execute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, PyTorch asks NVML for GPUs, not CUDA, which no fork could use afterwards (torch/cuda/__init__.py)."""


class Process(Protocol):
    """A process that runs: ``status`` is ``None`` until it ends, then its exit code, negative for a signal."""

    def status(self) -> int | None: ...
    def kill(self) -> None: ...


@dataclass(slots=True)
class Forked:
    """A child of this process."""

    pid: int
    _status: int | None = None

    def status(self) -> int | None:
        """Its exit code once it has ended."""
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
    """A process of its own."""

    process: subprocess.Popen[bytes]

    def status(self) -> int | None:
        """Its exit code once it has ended."""
        return self.process.poll()

    def kill(self) -> None:
        """Stop it at once and wait for its end."""
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Running:
    """A process with its result's file, its log, and when it began (seconds of ``time.monotonic``)."""

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
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    return Forked(pid) if pid else _child(job, result, log, prepare)


def can_fork(job: Job) -> bool:
    """Whether a fork of a process that ``preload`` prepared measures what a fresh process would."""
    optimizer = job.workload.get("train", {}).get("optim", "")
    needs_bitsandbytes = any(word in optimizer for word in ("bnb", "8bit", "lion", "ademamix", "paged"))
    return not job.workload.get("allocator") and not needs_bitsandbytes


def preload() -> bool:
    """Import what every row needs; False where that initialised CUDA, after which no fork could use the GPU."""
    os.environ[NVML_CHECK] = "1"
    set_environment(os.environ, "")
    with _hidden("bitsandbytes"):
        import torch

        from trainatomy.gpu import on_card  # noqa: F401
        from trainatomy.training.loops import inference, pytorch, trainer  # noqa: F401

        trainer._observed_trainer()
    return not torch.cuda.is_initialized()


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make ``module`` look as if it were not installed."""
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def _child(job: Job, result: Path, log: Path, prepare: Callable[[], None] | None) -> NoReturn:
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        os.environ.pop(NVML_CHECK, None)
        if prepare is not None:
            prepare()
        execute(job, result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    execute(Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
