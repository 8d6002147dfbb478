"""Run tasks on several GPUs, one process for each, started by torchrun; end them whatever happens."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import trainatomy
from trainatomy.errors import DeviceError
from trainatomy.measurement.process.job import NVML_CHECK, LogTail, Progress, read_progress, set_environment
from trainatomy.measurement.process.pool import worker_died
from trainatomy.measurement.process.rank import MODULE, POLL_SECONDS, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainatomy.measurement.process.pool import TimeLimit

GRACE_SECONDS = 5.0
"""Time for the other ranks to end by themselves once one has failed: they often fail for the same reason."""
_EXIT_SECONDS = 5.0
_LAUNCHER_REPORT = "torch/distributed/elastic/"
"""File that torchrun's own report comes from, which follows what its processes said."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """A function to run in every rank.

    Attributes:
        name: Name of the run in its progress.
        function: ``module:function``; gets ``arguments`` and a ``Reporter`` and returns a mapping of plain values, in
            which ``left_early`` says that other ranks wait for it in vain.
        arguments: Plain values.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The end of a task in one rank.

    Attributes:
        rank: The rank.
        result: What the function returned; ``None`` if its process died.
        code: Exit code of its process, negative for a signal.
        was_stopped: It was killed because another rank had failed.
        log: The last lines that it printed.
    """

    rank: int
    result: Mapping[str, Any] | None
    code: int
    was_stopped: bool
    log: str

    @property
    def went_well(self) -> bool:
        """True if the function returned, and no other rank waited for it in vain."""
        return self.code == 0 and self.result is not None

    def died(self) -> DeviceError:
        """Return the error for a process that ended without a result."""
        return DeviceError(f"rank {self.rank}: {worker_died(self.code, self.log)}")


class RankProcesses:
    """One process for each of ``count`` GPUs of this machine, started by one call of torchrun (its elastic agent).

    The processes load the libraries once and fork for each task, so that CUDA is new in each.  A rank that fails ends
    its task in the others too.
    """

    def __init__(
        self, count: int, allocator: str = "", *, forks: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        """Describe the launch.

        Args:
            count: Number of processes.
            allocator: Options of PyTorch's allocator in them.
            forks: False starts a fresh process for each task, where forks could not use the GPU.
            environment: Variables that they get besides those of this process.
        """
        self._count = count
        self._allocator = allocator
        self._variables = environment or {}
        self._options = () if forks else ("--spawn",)
        self._number = -1
        self._is_late = False

    def __enter__(self) -> RankProcesses:
        self._spool = Path(tempfile.mkdtemp(prefix="trainatomy-ranks-"))
        self._alive: IO[str] = (self._spool / "alive").open("w")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        with (self._spool / "log").open("wb") as log:
            self._launcher = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(),
                start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError):
            write_whole(self._spool / "end", "")
        if kind is None:
            self._has_ended(_EXIT_SECONDS)
        self._kill()
        self._alive.close()
        shutil.rmtree(self._spool, ignore_errors=True)

    def run(
        self, task: RankTask, limit: TimeLimit | None = None, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> tuple[RankAnswer, ...]:
        """Run a task in every rank and return their answers in the order in which they ended.

        Raises:
            DeviceError: torchrun or one of its processes died, or the task did not end within ``limit``.
        """
        self._number += 1
        content = {"name": task.name, "function": task.function, "arguments": dict(task.arguments)}
        write_whole(self._spool / f"task-{self._number}.json", json.dumps(content, default=str))
        progress = _ProgressFile(self._spool / f"progress-{self._number}", on_progress)
        answers: dict[int, RankAnswer] = {}
        stop_at: float | None = None
        while True:
            progress.read()
            for rank in sorted(set(range(self._count)) - set(answers)):
                if (answer := self._answer(rank, was_stopped=self._file("stop").exists())) is not None:
                    answers[rank] = answer
                    if not answer.went_well:
                        stop_at = stop_at or time.monotonic() + GRACE_SECONDS
            if len(answers) == self._count:
                return tuple(answers.values())
            if stop_at is not None and time.monotonic() > stop_at:
                write_whole(self._file("stop"), "")
            if self._launcher.poll() is not None:
                raise DeviceError(worker_died(self._launcher.returncode, self._logs(answers), progress.last))
            if limit is not None and not limit.remaining():
                self._is_late = True
                raise DeviceError(self._late(limit, answers, progress.last))
            time.sleep(POLL_SECONDS)

    def is_alive(self) -> bool:
        """Return whether the processes can run another task: after a time limit, they hang."""
        return not self._is_late and self._launcher.poll() is None

    def _file(self, name: str) -> Path:
        return self._spool / f"{name}-{self._number}"

    def _answer(self, rank: int, *, was_stopped: bool) -> RankAnswer | None:
        try:
            code = int(self._file("ended").with_suffix(f".{rank}").read_text())
        except FileNotFoundError:
            return None
        result = None
        with suppress(FileNotFoundError):
            result = json.loads((self._spool / f"result-{self._number}.{rank}.json").read_text(encoding="utf-8"))
        return RankAnswer(rank, result, code, was_stopped and code == -signal.SIGKILL, self._log(rank))

    def _log(self, rank: int) -> str:
        return _last_lines(self._file("log").with_suffix(f".{rank}"))

    def _logs(self, answers: Mapping[int, RankAnswer]) -> str:
        """Return the last lines of torchrun and of the ranks that have not ended."""
        missing = [f"    rank {rank}:\n{self._log(rank)}" for rank in range(self._count) if rank not in answers]
        return "\n".join([_last_lines(self._spool / "log", before=_LAUNCHER_REPORT), *missing])

    def _late(self, limit: TimeLimit, answers: Mapping[int, RankAnswer], last: Progress | None) -> str:
        return (
            f"The processes of the {self._count} GPUs did not end within {limit.seconds:.3g} s and were stopped; the "
            f"last stage of rank 0: {last or 'starting'}. Their last lines:\n{self._logs(answers)}\n"
            "Allow more time, or describe a smaller training."
        )

    def _command(self) -> list[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        return [*launch, f"--nproc-per-node={self._count}", "-m", MODULE, str(self._spool), *self._options]

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != NVML_CHECK}
        set_environment(environment, self._allocator)
        paths = (str(Path(trainatomy.__file__).parents[1]), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        # torchrun would set 1, and weights are drawn on the CPU.
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // self._count, 1)))
        return environment | dict(self._variables)

    def _has_ended(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(seconds)
        return self._launcher.poll() is not None

    def _kill(self) -> None:
        """End torchrun, which ends its processes; if it does not, Linux kills them with it (``end_with_parent``)."""
        if self._launcher.poll() is None:
            self._launcher.terminate()
            self._has_ended(_EXIT_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()


class _ProgressFile:
    """The lines of progress that rank 0 appends to a file."""

    def __init__(self, path: Path, on_progress: Callable[[Progress], None]) -> None:
        self._path = path
        self._on_progress = on_progress
        self._read = 0
        self.last: Progress | None = None

    def read(self) -> None:
        """Report the complete lines that are new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        complete = text[: text.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            self.last = read_progress(json.loads(line)["progress"])
            self._on_progress(self.last)


def _last_lines(path: Path, before: str = "") -> str:
    """Return the end of a log, indented; only lines before the first with the text ``before``, if there are any."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    earlier = list(takewhile(lambda line: before not in line, lines)) if before else lines
    return LogTail(earlier or lines).text()
