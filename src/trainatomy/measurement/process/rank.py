"""The process of one rank: ``python -m trainatomy.measurement.process.rank FOLDER [--spawn]``, started by torchrun.

It takes tasks from files in FOLDER, which ``ranks.RankProcesses`` writes, and runs each in a child process in which
CUDA is new: a fork of this process, which has loaded the libraries, or a fresh process (``--spawn``).  The files of
task ``N`` and rank ``R``::

    task-N.json       what to run; ``end``: no more tasks
    progress-N        lines of progress of rank 0
    log-N.R           what the child printed
    result-N.R.json   what it returned
    ended-N.R         its exit code, negative for a signal
    stop-N            written to end the children of task N
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.process.job import ALLOCATOR_VARIABLES, NVML_CHECK, RUN_VARIABLE, Reporter, to_plain
from trainatomy.measurement.process.worker import FAILED, preload
from trainatomy.processes import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODULE = "trainatomy.measurement.process.rank"
POLL_SECONDS = 0.02
LEFT_EARLY = 75
"""Exit code of a rank that has a result, but left the others waiting for its collectives."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve tasks until ``end`` is written or the process that writes them is gone."""
    folder, *options = sys.argv[1:] if arguments is None else arguments
    end_with_parent()
    spool = Path(folder)
    if options[:1] == ["--task"]:
        _run_and_exit(spool, int(options[1]))
    forks = "--spawn" not in options and preload(os.environ.get(ALLOCATOR_VARIABLES[0], ""))
    rank = int(os.environ["RANK"])
    for number in count():
        while not (spool / f"task-{number}.json").exists():
            if (spool / "end").exists() or _is_abandoned(spool):
                return 0
            time.sleep(POLL_SECONDS)
        if forks:
            _import_function(spool, number)
        child = _start(spool, number, forks=forks)
        code = _wait(child, spool, number)
        if code is None:
            return FAILED
        write_whole(spool / f"ended-{number}.{rank}", str(code))
    return 0


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _is_abandoned(spool: Path) -> bool:
    """Return whether the process that writes the tasks is gone: it holds a lock on ``alive`` while it lives."""
    try:
        with (spool / "alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _import_function(spool: Path, number: int) -> None:
    """Import the module of a task's function, so that the forks need not; what fails here is reported by the fork."""
    with suppress(Exception):
        import_module(_read(spool, number)["function"].partition(":")[0])


def _read(spool: Path, number: int) -> dict[str, Any]:
    """Read what to run."""
    task: dict[str, Any] = json.loads((spool / f"task-{number}.json").read_text(encoding="utf-8"))
    return task


def _start(spool: Path, number: int, *, forks: bool) -> int:
    """Start a child that runs a task, and return its process id."""
    if not forks:
        command = [sys.executable, "-m", MODULE, str(spool), "--task", str(number)]
        return os.spawnv(os.P_NOWAIT, sys.executable, command)
    sys.stdout.flush()
    sys.stderr.flush()
    server = os.getpid()
    pid = os.fork()
    if not pid:
        end_with_parent(server)
        _run_and_exit(spool, number)
    return pid


def _wait(child: int, spool: Path, number: int) -> int | None:
    """Return the child's exit code once it has ended or was stopped; ``None`` if there is nobody to tell."""
    is_killed = False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        abandoned = _is_abandoned(spool)
        if not is_killed and (abandoned or (spool / f"stop-{number}").exists()):
            os.kill(child, signal.SIGKILL)
            is_killed = True
        if abandoned:
            os.waitpid(child, 0)
            return None
        time.sleep(POLL_SECONDS)


def _run_and_exit(spool: Path, number: int) -> NoReturn:
    """Run a task in this process and end it without waiting for anything, such as a collective that never ends."""
    code = FAILED
    try:
        rank = int(os.environ["RANK"])
        log = os.open(spool / f"log-{number}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.pop(NVML_CHECK, None)
        os.environ[RUN_VARIABLE] = str(number)
        code = _run(spool, number, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(spool: Path, number: int, rank: int) -> int:
    """Run a task and write its result; an unexpected error leaves its traceback in the log."""
    task = _read(spool, number)
    descriptor = None if rank else os.open(spool / f"progress-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    reporter = Reporter(descriptor, task["name"])
    reporter.stage("loading libraries")
    module, _, name = task["function"].partition(":")
    result: Mapping[str, Any]
    try:
        result = getattr(import_module(module), name)(task["arguments"], reporter)
    except TrainatomyError as error:
        result = to_plain(error) | {"left_early": True}
    except Exception:
        traceback.print_exc()
        return FAILED
    write_whole(spool / f"result-{number}.{rank}.json", json.dumps(result, default=str))
    return LEFT_EARLY if result.get("left_early") else 0


if __name__ == "__main__":
    raise SystemExit(main())
