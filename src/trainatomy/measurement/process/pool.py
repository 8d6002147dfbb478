"""Start worker processes, send them jobs, read their answers, and end them whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.job import (
    NVML_CHECK,
    Job,
    LogTail,
    Progress,
    can_fork,
    from_plain,
    read_progress,
    set_environment,
)
from trainatomy.results.measurement import Measurement

WORKER = (sys.executable, "-m", "trainatomy.measurement.process.worker")
_EXIT_SECONDS = 5.0
"""Time for a process to exit by itself once it has nothing left to do."""
_LOG_SECONDS = 0.3
"""Time to wait for the log of a process that keeps running."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A limit of ``seconds`` for a measurement, counted from ``began`` (``time.monotonic``)."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        return max(self.began + self.seconds - time.monotonic(), 0.0)


class WorkerPool:
    """Pool that runs jobs, each in a process in which CUDA is new; ends its worker processes on exit.

    A job that will be followed by more (``more`` or ``lasting``) starts a worker that loads the libraries once and
    forks for each job.  It serves the following jobs until one of them fails.  Where its forks cannot use the GPU,
    every job gets its own process.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        """Take ``lasting`` where many measurements follow, so that a forking worker pays off from the first job on."""
        self._lasting = lasting
        self._forking: WorkerProcess | None = None
        self._cannot_fork = False
        self._exits = ExitStack()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop(*exception)

    def run(
        self, job: Job, limit: TimeLimit | None, on_progress: Callable[[Progress], None], *, more: bool = False
    ) -> Measurement:
        """Run ``job``; returns and raises as ``WorkerProcess.run``.

        ``more``: a job of the same kind will follow.
        """
        if can_fork(job) and self._has_forking_worker(limit, start=more or self._lasting):
            assert self._forking is not None
            try:
                return self._forking.run(job, limit, on_progress)
            except (DeviceError, KeyboardInterrupt):
                self._stop(*sys.exc_info())
                raise
        with WorkerProcess(WORKER, str(job.workload.get("allocator", ""))) as worker:
            return worker.run(job, limit, on_progress)

    def _has_forking_worker(self, limit: TimeLimit | None, *, start: bool) -> bool:
        """Return whether a worker whose forks can use the GPU runs; with ``start``, start one if there is none."""
        if self._forking is None and start and not self._cannot_fork:
            self._forking = self._exits.enter_context(WorkerProcess([*WORKER, "--fork"], ""))
            if not self._forking.is_ready(limit):
                self._stop(None, None, None)
                self._cannot_fork = True
        return self._forking is not None

    def _stop(self, *exception: object) -> None:
        self._forking = None
        self._exits.__exit__(*exception)  # type: ignore[arg-type]


class WorkerProcess:
    """A worker process, in a process group of its own that ends with this context."""

    def __init__(self, command: Sequence[str], allocator: str) -> None:
        """Take ``command``, which starts the worker, and ``allocator``: the options of PyTorch's allocator in it."""
        self._command = command
        self._allocator = allocator
        self._limit: TimeLimit | None = None
        self._on_progress: Callable[[Progress], None] = lambda _: None
        self._answers: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._log = LogTail()
        self._threads: list[threading.Thread] = []
        self._last: Progress | None = None

    def __enter__(self) -> WorkerProcess:
        environment = {name: value for name, value in os.environ.items() if name != NVML_CHECK}
        set_environment(environment, self._allocator)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._read_in_thread(self._read_answers, self._process.stdout)
        self._read_in_thread(self._read_log, self._process.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if kind is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
        self._kill()

    def is_ready(self, limit: TimeLimit | None) -> bool:
        """Return whether the worker's forks can use the GPU.

        Raises:
            DeviceError: The worker does not answer within ``limit``.
        """
        self._limit = limit
        answer = self._next_answer()
        return answer is not None and bool(answer.get("ready"))

    def run(self, job: Job, limit: TimeLimit | None, on_progress: Callable[[Progress], None]) -> Measurement:
        """Run ``job`` in the worker and return its measurement.

        Raises:
            TrainatomyError: The error that the worker reported instead of a result.
            DeviceError: The process that ran the job died or did not end within ``limit``.
        """
        assert self._process.stdin is not None
        self._limit, self._on_progress, self._last = limit, on_progress, None
        self._log.clear()
        try:
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
        except OSError:  # the worker is gone: its last words are in the answers and the log
            pass
        result: Mapping[str, Any] | None = None
        while True:
            answer = self._next_answer()
            if answer is None or "ended" in answer:
                break
            result = answer.get("result", result)
        if result is not None:
            return from_plain(result)
        raise DeviceError(worker_died(self._exit_code(answer), self._last_log_lines(), self._last))

    def _next_answer(self) -> Mapping[str, Any] | None:
        """Return the next answer that is not progress, or ``None`` once there are no more."""
        while True:
            try:
                answer = self._answers.get(timeout=None if self._limit is None else self._limit.remaining())
            except queue.Empty:
                raise DeviceError(self._timeout_message()) from None
            if answer is None or "progress" not in answer:
                return answer
            self._last = read_progress(answer["progress"])
            self._on_progress(self._last)

    def _exit_code(self, answer: Mapping[str, Any] | None) -> int:
        """Return how the process that ran the job ended; kill a worker that only stopped answering."""
        if answer is not None:
            return int(answer["ended"])
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_EXIT_SECONDS)
        self._kill()
        return int(self._process.returncode)

    def _timeout_message(self) -> str:
        allowed = f" within {self._limit.seconds:.3g} s" if self._limit else ""
        return (
            f"The worker process did not end{allowed} and was stopped; its last stage: "
            f"{self._last or 'starting'}. Its last lines:\n{self._last_log_lines()}\n"
            "Allow more time, or describe a smaller training."
        )

    def _last_log_lines(self) -> str:
        """Return the end of the log, after waiting for earlier output to arrive."""
        is_alive = self._process.poll() is None
        self._threads[-1].join(_LOG_SECONDS if is_alive else _EXIT_SECONDS)
        return self._log.text()

    def _read_in_thread(self, read: Callable[[IO[str]], None], stream: IO[str]) -> None:
        thread = threading.Thread(target=read, args=(stream,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read_answers(self, stream: IO[str]) -> None:
        for line in stream:
            try:
                self._answers.put(json.loads(line))
            except ValueError:  # a library that bypasses Python's standard output
                self._log.append(line.rstrip())
        self._answers.put(None)

    def _read_log(self, stream: IO[str]) -> None:
        for line in stream:
            self._log.append(line.rstrip())

    def _kill(self) -> None:
        """Kill the whole process group: the worker's children use the GPU."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(_EXIT_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def worker_died(status: int, log: str, last: Progress | None = None) -> str:
    """Return the error message for a worker that ended without a result.

    Args:
        status: Exit code, as in ``subprocess``: negative for a signal.
        log: The end of its log.
        last: Its last progress.
    """
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
    where = f" ({last})" if last is not None else ""
    advice = "Signal 9 usually means that the machine ran out of host memory. " if status == -9 else ""
    return (
        f"The worker process that used the GPU {how}{where}. {advice}Its last lines:\n{log}\n"
        "If the message is not about your own code, check that `nvidia-smi` works and that PyTorch fits the driver."
    )
