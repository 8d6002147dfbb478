"""The parent's side of a session: start the process, hand it jobs, read its answers, and end it whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.forks import NVML_CHECK
from trainatomy.measurement.process.job import Job, from_plain, set_environment
from trainatomy.measurement.process.reporting import Progress, progress_of
from trainatomy.results.measurement import Measurement

LOG_LINES = 12
GRACE_SECONDS = 5.0
"""How long a process may take to end by itself once it has nothing left to do."""
LOG_SECONDS = 0.3
"""How long the log of a process that goes on is waited for."""


@dataclass(frozen=True, slots=True)
class Limit:
    """``seconds`` for a measurement, from the moment ``began`` of ``time.monotonic``."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds; not less than none."""
        return max(self.began + self.seconds - time.monotonic(), 0.0)


class Host:
    """A session in a process group of its own, which ends with this context."""

    def __init__(self, command: Sequence[str], allocator: str) -> None:
        self._command = command
        self._allocator = allocator
        self._limit: Limit | None = None
        self._tell: Callable[[Progress], None] = lambda _: None
        self._answers: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._threads: list[threading.Thread] = []
        self._last: Progress | None = None

    def __enter__(self) -> Host:
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
        self._follow(self._read_answers, self._process.stdout)
        self._follow(self._read_log, self._process.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        if kind is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        self._kill()

    def is_ready(self, limit: Limit | None) -> bool:
        """Whether the session says that its children can use the GPU; raises ``DeviceError`` where it says nothing
        within ``limit``."""
        self._limit = limit
        answer = self._next()
        return answer is not None and bool(answer.get("ready"))

    def run(self, job: Job, limit: Limit | None, tell: Callable[[Progress], None]) -> Measurement:
        """Have ``job`` run and ``tell`` of its progress. Raises the error that took the result's place, and
        ``DeviceError`` where the process that ran it died or did not end within ``limit``."""
        assert self._process.stdin is not None
        self._limit, self._tell, self._last = limit, tell, None
        self._log.clear()
        try:
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
        except OSError:  # it is gone: what it left to say is in the answers and the log
            pass
        result: Mapping[str, Any] | None = None
        while True:
            answer = self._next()
            if answer is None or "ended" in answer:
                break
            result = answer.get("result", result)
        if result is not None:
            return from_plain(result)
        raise DeviceError(died(self._status(answer), self._ending(), self._last))

    def _next(self) -> Mapping[str, Any] | None:
        """The next answer that is not progress; ``None`` where there will be none."""
        while True:
            try:
                answer = self._answers.get(timeout=None if self._limit is None else self._limit.left())
            except queue.Empty:
                raise DeviceError(self._too_late()) from None
            if answer is None or "progress" not in answer:
                return answer
            self._last = progress_of(answer["progress"])
            self._tell(self._last)

    def _status(self, answer: Mapping[str, Any] | None) -> int:
        """How the process that should have made a result ended; one that only fell silent is ended."""
        if answer is not None:
            return int(answer["ended"])
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE_SECONDS)
        self._kill()
        return int(self._process.returncode)

    def _too_late(self) -> str:
        allowed = f" within {self._limit.seconds:.3g} s" if self._limit else ""
        return (
            f"The worker process did not end{allowed} and was stopped; it was at: "
            f"{self._last or 'starting'}. Its last lines:\n{self._ending()}\n"
            "Allow more time, or describe a smaller training."
        )

    def _ending(self) -> str:
        """The last lines of the log, once what was written before has had time to arrive."""
        alive = self._process.poll() is None
        self._threads[-1].join(LOG_SECONDS if alive else GRACE_SECONDS)
        return indented(self._log)

    def _follow(self, read: Callable[[IO[str]], None], stream: IO[str]) -> None:
        thread = threading.Thread(target=read, args=(stream,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read_answers(self, stream: IO[str]) -> None:
        for line in stream:
            try:
                self._answers.put(json.loads(line))
            except ValueError:  # a library that writes past Python's standard output
                self._log.append(line.rstrip())
        self._answers.put(None)

    def _read_log(self, stream: IO[str]) -> None:
        for line in stream:
            self._log.append(line.rstrip())

    def _kill(self) -> None:
        """End the whole group: the session's children use the GPU."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(GRACE_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def died(status: int, ending: str, last: Progress | None = None) -> str:
    """What to say of a worker that ended without a result; ``status`` as in ``subprocess``, negative for a signal."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
    where = f" ({last})" if last is not None else ""
    advice = "Signal 9 usually means that the machine ran out of host memory. " if status == -9 else ""
    return (
        f"The worker process that used the GPU {how}{where}. {advice}Its last lines:\n{ending}\n"
        "If the message is not about your own code, check that `nvidia-smi` works and that PyTorch fits the driver."
    )


def indented(lines: Iterable[str]) -> str:
    """The end of a log."""
    return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
