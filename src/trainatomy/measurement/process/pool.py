"""Run tasks in new processes, forked from servers that have imported the libraries, and end them whatever happens."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import trainatomy
from trainatomy.errors import DeviceError
from trainatomy.measurement.process.calls import calling, returned
from trainatomy.measurement.process.job import NVML_CHECK, LogTail, Progress, Task, read_progress, set_environment

SERVER = (sys.executable, "-m", "trainatomy.measurement.process.server")
_EXIT_SECONDS = 5.0
"""Time for a process to exit by itself once it has nothing left to do."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A limit of ``seconds`` for a measurement, counted from ``began`` (``time.monotonic``)."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        return max(self.began + self.seconds - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a task in one rank.

    Attributes:
        rank: The rank.
        result: What the function returned; ``None`` if its process died.
        code: Exit code of its process, negative for a signal.
        was_stopped: It was killed because another rank had failed.
        log: The last lines that it printed.
        last: Its last progress, which rank 0 alone reports.
        among: Number of ranks.
    """

    rank: int
    result: Mapping[str, Any] | None
    code: int
    was_stopped: bool
    log: str
    last: Progress | None = None
    among: int = 1

    @property
    def went_well(self) -> bool:
        """True if the function returned, and no other rank waited for it in vain."""
        return self.code == 0 and self.result is not None

    def died(self) -> DeviceError:
        """Return the error for a process that ended without a result."""
        where = f"rank {self.rank}: " if self.among > 1 else ""
        return DeviceError(where + process_died(self.code, self.log, self.last))


class Server:
    """A server process, in a process group of its own that ends with this context."""

    def __init__(self, allocator: str = "", *, preloaded: bool = True, loops: tuple[str, ...] = ()) -> None:
        """Describe the server.

        Args:
            allocator: Options of PyTorch's allocator in it.
            preloaded: Import the libraries before processes are forked.
            loops: Training loops whose libraries are imported at once.
        """
        self._allocator = allocator
        self._options = ("--preload", *loops) if preloaded else ()
        self._log = LogTail()
        self._tasks: dict[int, RunningTask] = {}
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Server:
        environment = {name: value for name, value in os.environ.items() if name != NVML_CHECK}
        set_environment(environment, self._allocator)
        paths = (str(Path(trainatomy.__file__).parents[1]), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [*SERVER, *self._options],
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
        self._read_in_thread(self._read_log, self._process.stderr)
        self._read_in_thread(self._read_answers, self._process.stdout)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the whole process group: the server's children use the GPU."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(_EXIT_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):  # what it did not read
                if stream is not None:
                    stream.close()

    def start(self, task: Task, on_progress: Callable[[Progress], None] = lambda _: None) -> RunningTask:
        """Start the processes of a task; ``on_progress`` is called in another thread."""
        running = RunningTask(self, next(self._numbers), task, on_progress)
        self._tasks[running.number] = running
        self.send({"task": running.number, **asdict(task)})
        return running

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line; a server that is gone says so by the end of its answers."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(message, default=str) + "\n")
            self._process.stdin.flush()

    def is_alive(self) -> bool:
        """Return whether the server can run another task."""
        return self._process.poll() is None

    def died(self, last: Progress | None) -> DeviceError:
        """Return the error for a server that stopped answering, after its output has arrived."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self._process.kill()
        self._process.wait()
        self._threads[0].join(_EXIT_SECONDS)
        return DeviceError(process_died(self._process.returncode, self._log.text(), last))

    def _read_in_thread(self, read: Callable[[IO[str]], None], stream: IO[str]) -> None:
        thread = threading.Thread(target=read, args=(stream,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read_answers(self, stream: IO[str]) -> None:
        for line in stream:
            try:
                answer = json.loads(line)
                self._tasks[answer["task"]].take(answer)
            except (ValueError, KeyError, TypeError):  # a library that bypasses Python's standard output
                self._log.append(line.rstrip())
        for task in list(self._tasks.values()):
            task.answers.put(None)

    def _read_log(self, stream: IO[str]) -> None:
        for line in stream:
            self._log.append(line.rstrip())


class RunningTask:
    """A task whose processes were started."""

    def __init__(self, server: Server, number: int, task: Task, on_progress: Callable[[Progress], None]) -> None:
        self.number = number
        self.task = task
        self.answers: queue.Queue[Mapping[str, Any] | BaseException | None] = queue.Queue()
        self._server = server
        self.on_progress = on_progress
        self._last: Progress | None = None
        self._results: dict[int, Mapping[str, Any]] = {}
        self._ended: dict[int, Answer] = {}

    def take(self, answer: Mapping[str, Any]) -> None:
        """Report progress, and keep any other answer."""
        if "progress" not in answer:
            self.answers.put(answer)
            return
        self._last = read_progress(answer["progress"])
        try:
            self.on_progress(self._last)
        except BaseException as error:
            self.answers.put(error)

    def stop(self) -> None:
        """Kill the processes."""
        self._server.send({"stop": self.number})

    def wait(self, limit: TimeLimit | None = None) -> tuple[Answer, ...]:
        """Return the answers of all ranks in the order in which they ended.

        Raises:
            DeviceError: The server died, or the task did not end within ``limit``.
            Refused: No fork of the server can use the GPU.
        """
        try:
            while len(self._ended) < self.task.ranks:
                self._read(None if limit is None else limit.remaining())
        except queue.Empty:
            self.stop()
            with suppress(queue.Empty, DeviceError):
                while len(self._ended) < self.task.ranks:
                    self._read(_EXIT_SECONDS)
            raise DeviceError(self._late(limit)) from None
        except BaseException:
            self.stop()
            raise
        return tuple(self._ended.values())

    def _read(self, seconds: float | None) -> None:
        """Take in the next answer; raise ``queue.Empty`` if there is none within ``seconds``."""
        answer = self.answers.get(timeout=seconds)
        if answer is None:
            raise self._server.died(self._last)
        if isinstance(answer, BaseException):
            raise answer
        if "refused" in answer:
            raise Refused
        if "result" in answer:
            self._results[answer["rank"]] = answer["result"]
        else:
            rank = answer["rank"]
            self._ended[rank] = Answer(
                rank, self._results.get(rank), answer["ended"], answer["stopped"], answer["log"],
                None if rank else self._last, self.task.ranks,
            )  # fmt: skip

    def _late(self, limit: TimeLimit | None) -> str:
        several = self.task.ranks > 1
        who = f"processes of the {self.task.ranks} GPUs" if several else "process that used the GPU"
        logs = [
            f"    rank {one.rank}:\n{one.log}\n" if several else f"{one.log}\n"
            for one in self._ended.values()
            if one.was_stopped
        ]
        return (
            f"The {who} did not end within {limit.seconds if limit else 0:.3g} s and {'were' if several else 'was'} "
            f"stopped; the last stage{' of rank 0' if several else ''}: {self._last or 'starting'}. Last lines:\n"
            f"{''.join(logs)}Allow more time, or describe a smaller training."
        )


class Refused(Exception):
    """Importing the libraries initialised CUDA, so that no fork of the server can use the GPU."""


class Processes:
    """Runs tasks, each in processes in which CUDA is new; ends them on exit.

    A server imports the libraries once and serves all tasks with its options of the allocator.  Where forks of one that
    has imported the libraries cannot use the GPU, the processes of a task import them.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[str, bool], Server] = {}
        self._cannot_fork = False
        self._exits = ExitStack()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.__exit__(*exception)  # type: ignore[arg-type]

    def expect(self, *tasks: Task) -> None:
        """Let servers for these tasks start to import the libraries."""
        loops = tuple(dict.fromkeys(task.loop for task in tasks if task.loop))
        for task in tasks:
            self._server(task, loops)

    def run(
        self,
        task: Task,
        limit: TimeLimit | None = None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[Answer, ...]:
        """Run a task in every rank and return their answers in the order in which they ended.

        Args:
            task: What to run.
            limit: Time for it.
            on_progress: Called in another thread.
            meanwhile: Called once the task has been started.

        Raises:
            DeviceError: The server died, or the task did not end within ``limit``.
        """
        running = self.start(task, on_progress)
        try:
            meanwhile()
        except BaseException:
            running.stop()
            raise
        return self._finish(running, limit)

    def start(self, task: Task, on_progress: Callable[[Progress], None] = lambda _: None) -> RunningTask:
        """Start the processes of a task."""
        return self._server(task).start(task, on_progress)

    def call(self, like: Task, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Begin to call a function in a process of its own; return a function that waits for what it returns.

        Args:
            like: A task with the libraries that the function needs.
            function: Can be pickled, as what it returns or raises.
            *arguments: Its arguments.
        """
        running = self.start(calling(like, function, *arguments))
        return lambda: returned(self._finish(running, None))

    def _finish(self, running: RunningTask, limit: TimeLimit | None) -> tuple[Answer, ...]:
        """Return the answers of a task, whose processes are started anew where forks cannot use the GPU."""
        try:
            return running.wait(limit)
        except Refused:
            self._cannot_fork = True
            return self.start(running.task, running.on_progress).wait(limit)

    def _server(self, task: Task, loops: tuple[str, ...] = ()) -> Server:
        """Return the server for a task, started now unless there is one."""
        key = (task.allocator, task.preloaded and not self._cannot_fork)
        server = self._servers.get(key)
        if server is None or not server.is_alive():
            server = Server(key[0], preloaded=key[1], loops=loops)
            self._servers[key] = self._exits.enter_context(server)
        return server


def process_died(status: int, log: str, last: Progress | None = None) -> str:
    """Return the error message for a process that ended without a result.

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
