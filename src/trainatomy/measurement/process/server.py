"""The process that measuring processes are forked from: ``python -m …process.server [--preload LOOP …]``.

It imports the libraries once and forks a process for each rank of a task, in which CUDA is new.  Without ``--preload``
the processes import the libraries themselves.  Lines of JSON come from standard input::

    {"task": N, "ranks": …}               run a task (``job.Task``)
    {"stop": N}                           kill its processes

and go to standard output::

    {"task": N, "rank": R, "progress": …} from rank 0
    {"task": N, "rank": R, "result": …}   what the function returned, or the error that it raised
    {"task": N, "rank": R, "ended": CODE, "stopped": …, "log": …}  negative for a signal; the end of what it printed
    {"task": N, "refused": true}          importing the libraries initialised CUDA, so that no fork can use the GPU

What the server itself prints goes to standard error.  All processes end with the one that started the server.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any, NoReturn

from trainatomy.errors import TrainatomyError
from trainatomy.libraries import version_of
from trainatomy.measurement.process.job import (
    ALLOCATOR_VARIABLES,
    NVML_CHECK,
    RUN_VARIABLE,
    Channel,
    LogTail,
    Reporter,
    set_environment,
    to_plain,
)
from trainatomy.processes import end_with_parent
from trainatomy.workload.loops import LOOPS

GRACE_SECONDS = 5.0
"""Time for the other ranks to end by themselves once one has failed: they often fail for the same reason."""
POLL_SECONDS = 0.02
FAILED = 1
LEFT_EARLY = 75
"""Exit code of a rank that has a result, but left the others waiting for its collectives."""
_HOST = "127.0.0.1"
_WARM_POOL = "TORCH_WARM_POOL"
"""Older releases of PyTorch start processes that compile when Inductor is imported, unless this variable is 0."""
_IMPORTED_BY = {"bitsandbytes": "torch._inductor.compile_fx"}
"""What the import of a library imports for the most part, where the library itself would initialise CUDA."""


def preload(loops: Iterable[str] | None = None, allocator: str = "") -> bool:
    """Import what trainings need; return False if that initialised CUDA, so that no fork can use the GPU.

    Args:
        loops: Names of their loops (default: all whose libraries are installed).
        allocator: Options of PyTorch's allocator, which it reads when it is loaded.
    """
    os.environ[NVML_CHECK] = "1"
    set_environment(os.environ, allocator)
    with _hidden("bitsandbytes"), _without_pool():
        import torch

        import_module("trainatomy.measurement.step.runner")
        import_module("torch._dynamo")  # the first step of an optimizer would
        for loop in LOOPS.values() if loops is None else [LOOPS[name] for name in loops if name in LOOPS]:
            if all(map(version_of, loop.libraries)):
                for module in (*loop.imports, loop.module):
                    import_module(module)
        for library, module in _IMPORTED_BY.items():
            if version_of(library):
                import_module(module)
    return not torch.cuda.is_initialized()


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make ``module`` look as if it were not installed, then restore it."""
    loaded = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if loaded is None:
            del sys.modules[module]
        else:
            sys.modules[module] = loaded


@contextmanager
def _without_pool() -> Iterator[None]:
    """Keep PyTorch from starting processes that compile: a fork would share them."""
    before = os.environ.get(_WARM_POOL)
    os.environ[_WARM_POOL] = "0"
    try:
        yield
    finally:
        del os.environ[_WARM_POOL]
        if before is not None:
            os.environ[_WARM_POOL] = before


@dataclass(frozen=True, slots=True)
class _Rank:
    """A process of a task, with the file that it prints to."""

    task: int
    rank: int
    log: IO[bytes]


class Server:
    """Forks the processes of tasks and says how they ended."""

    def __init__(self, answers: Channel, *, preloads: bool) -> None:
        self._answers = answers
        self._preloads = preloads
        self._ranks: dict[int, _Rank] = {}
        self._stop_at: dict[int, float] = {}
        self._stopped: set[int] = set()
        self._store_port = 0

    def serve(self) -> None:
        """Serve tasks until standard input ends, then kill what still runs."""
        pending = b""
        while True:
            if select.select([0], [], [], POLL_SECONDS if self._ranks else None)[0]:
                read = os.read(0, 1 << 16)
                if not read:
                    break
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
            self._reap()
            for task, when in list(self._stop_at.items()):
                if time.monotonic() > when:
                    self._stop(task)
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "stop" in message:
            self._stop(message["stop"])
        elif self._preloads and not _prepared([message["loop"]], message):
            self._answers.write({"task": message["task"], "refused": True})
        else:
            self._fork(message)

    def _fork(self, task: Mapping[str, Any]) -> None:
        """Start the processes of a task."""
        if task["ranks"] > 1 and not self._store_port:
            self._store_port = _start_store()
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        for rank in range(task["ranks"]):
            log = tempfile.TemporaryFile()  # noqa: SIM115
            pid = os.fork()
            if not pid:
                end_with_parent(server)
                _run_and_exit(task, rank, log, self._answers, self._store_port)
            self._ranks[pid] = _Rank(task["task"], rank, log)

    def _stop(self, task: int) -> None:
        """Kill the processes of a task that still run."""
        self._stop_at.pop(task, None)
        for pid, rank in self._ranks.items():
            if rank.task == task:
                self._stopped.add(pid)
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report the processes that have ended; one that failed ends the others of its task."""
        for pid in list(self._ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            rank, code = self._ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code:
                self._stop_at.setdefault(rank.task, time.monotonic() + GRACE_SECONDS)
            if all(one.task != rank.task for one in self._ranks.values()):
                self._stop_at.pop(rank.task, None)
            stopped = pid in self._stopped and code == -signal.SIGKILL
            ending = {"ended": code, "stopped": stopped, "log": _end_of(rank.log)}
            self._answers.write({"task": rank.task, "rank": rank.rank, **ending})


def _prepared(loops: Iterable[str], task: Mapping[str, Any] | None = None) -> bool:
    """Do what the processes of a task then need not; return False if that initialised CUDA.

    What fails here is reported by the processes.
    """
    with suppress(Exception):
        preload(loops, os.environ.get(ALLOCATOR_VARIABLES[0], ""))
        if task is not None:
            import_module(task["function"].partition(":")[0])
            module, _, name = task["prepare"].partition(":")
            if module:
                # a thread, as OpenMP's threads belong to the one that uses them, and do not survive a fork
                thread = threading.Thread(target=getattr(import_module(module), name), args=(task["arguments"],))
                thread.start()
                thread.join()
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _start_store() -> int:
    """Start a process with the store of all process groups, and return its port.

    It is no rank's: a rank that fails must not take it along.
    """
    reading, writing = os.pipe()
    server = os.getpid()
    if not os.fork():
        end_with_parent(server)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while True:
            signal.pause()
    os.close(writing)
    with os.fdopen(reading) as answer:
        return int(answer.read(5) or 0)


def _end_of(log: IO[bytes]) -> str:
    """Return the last lines of a log, indented, and close it."""
    with log:
        log.seek(0)
        return LogTail(log.read().decode(errors="replace").splitlines()).text()


def _run_and_exit(task: Mapping[str, Any], rank: int, log: IO[bytes], answers: Channel, port: int) -> NoReturn:
    """Run a task in this process and end it without waiting for anything, such as a collective that never ends."""
    code = FAILED
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ.pop(NVML_CHECK, None)
        os.environ.update(task["environment"])
        if task["ranks"] > 1:
            _take_place(rank, task["ranks"], port, task["task"])
        code = _run(task, rank, answers)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_place(rank: int, count: int, port: int, task: int) -> None:
    """Set the variables that torchrun sets, and share the processors: weights are drawn on the CPU."""
    threads = max((os.cpu_count() or 1) // count, 1)
    if os.environ.setdefault("OMP_NUM_THREADS", str(threads)) == str(threads) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": _HOST, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, RUN_VARIABLE: task,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})


def _run(task: Mapping[str, Any], rank: int, answers: Channel) -> int:
    """Run a task and report its result; an unexpected error leaves its traceback in the log."""

    def write(content: Mapping[str, Any]) -> None:
        answers.write({"task": task["task"], "rank": rank, **content})

    reporter = Reporter(None if rank else write, task["name"])
    reporter.stage("loading libraries")
    module, _, name = task["function"].partition(":")
    result: Mapping[str, Any]
    try:
        # imports torch, unless it is preloaded; its allocator reads its options in the environment
        result = getattr(import_module(module), name)(task["arguments"], reporter)
    except TrainatomyError as error:
        result = to_plain(error) | {"left_early": True}
    except Exception:
        traceback.print_exc()
        return FAILED
    write({"result": result})
    return LEFT_EARLY if result.get("left_early") else 0


def main() -> int:
    """Serve tasks until standard input ends."""
    answers = Channel(os.dup(1))
    os.dup2(2, 1)
    preloads = "--preload" in sys.argv
    if preloads:
        _prepared(sys.argv[2:])
    Server(answers, preloads=preloads).serve()
    os._exit(0)  # without the libraries' farewells, which take seconds


if __name__ == "__main__":
    end_with_parent()
    main()
