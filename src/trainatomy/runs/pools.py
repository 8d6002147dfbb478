"""Pools of local processes that predict: forked from a process that has imported the libraries, and ended with us."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from typing import Any

from trainatomy.errors import TrainatomyError
from trainatomy.processes import SERVER_PARENT, ending_blocked

PRELOADED = ("trainatomy.runs.server", "trainatomy.runs.preload")
_HIDDEN = "TRAINATOMY_HIDDEN_MODULES"


def start_importing(jobs: int | None, hidden: Sequence[str] = ()) -> None:
    """Let the process that workers are forked from import the libraries, while this one prepares what to predict.

    Args:
        jobs: Number of processes; 1 is this process.
        hidden: Modules to hide from the workers.
    """
    if jobs is not None and jobs > 1:
        with hidden_in_workers(hidden):
            _start_server()


@contextmanager
def hidden_in_workers(modules: Sequence[str]) -> Iterator[None]:
    """Hide modules from the processes that are started meanwhile (see ``runs/preload.py``)."""
    os.environ[_HIDDEN] = " ".join(modules)
    try:
        yield
    finally:
        os.environ.pop(_HIDDEN, None)


@contextmanager
def process_pools(
    jobs: Sequence[int], initializer: Callable[..., None], *arguments: Any
) -> Iterator[list[ProcessPoolExecutor]]:
    """Yield pools of this many processes each, which end with the block, also those that still predict.

    Args:
        jobs: Number of processes of each pool.
        initializer: Called in each process before it predicts.
        *arguments: Its arguments.
    """
    _start_server()
    context = get_context("forkserver")
    started = (_end_with_server, (initializer, *arguments))
    pools = [ProcessPoolExecutor(each, context, initializer=started[0], initargs=started[1]) for each in jobs]
    try:
        yield pools
    except BrokenProcessPool as error:
        raise TrainatomyError(
            f"A process that predicted was killed, perhaps for lack of host memory; {sum(jobs)} ran in parallel. "
            "Try fewer: jobs=1."
        ) from error
    finally:
        _end(pools)


def _start_server() -> None:
    """Start the process that workers are forked from, unless it runs; Ctrl-C does not reach it while it starts."""
    get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    resource_tracker.ensure_running()  # unblocks signals where it has to start the tracker
    if threading.current_thread() is threading.main_thread():
        os.environ[SERVER_PARENT] = str(os.getpid())
    try:
        with ending_blocked():
            forkserver.ensure_running()
    finally:
        os.environ.pop(SERVER_PARENT, None)


def _end_with_server(initializer: Callable[..., None], *arguments: Any) -> None:
    """Prepare a worker, which must not keep its server alive: that one ends when nobody holds its pipe any more."""
    server: Any = forkserver._forkserver
    if (alive := server._forkserver_alive_fd) is not None:
        server._forkserver_alive_fd = None
        os.close(alive)
    initializer(*arguments)


def _end(pools: Sequence[ProcessPoolExecutor]) -> None:
    """End the processes of pools; where work was left, kill them and the server, which may be forking another one."""
    private: list[Any] = list(pools)
    if any(pool._pending_work_items for pool in private):
        processes = [process for pool in private for process in (pool._processes or {}).values()]
        _kill_server()
        for process in processes:
            with suppress(OSError):
                process.kill()
    for pool in pools:
        pool.shutdown(cancel_futures=True)


def _kill_server() -> None:
    """End the process that workers are forked from at once, whatever it imports; the next pool starts another."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(OSError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
