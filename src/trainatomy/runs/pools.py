"""Pools of local processes that predict: forked from a process that has imported the libraries, and ended with us.

Local processes of which each predicts training runs that are related to those it predicted before.

A process remembers the micro-batches of its last runs (``simulator/micro_batches.py``), so a training with the same
ones is predicted in about half the time by the process that remembers them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from trainatomy.errors import TrainatomyError
from trainatomy.processes import SERVER_PARENT, ending_blocked

PRELOADED = ("trainatomy.runs.server", "trainatomy.runs.preload")
_HIDDEN = "TRAINATOMY_HIDDEN_MODULES"
DEEPSPEED = "TRAINATOMY_IMPORTS_DEEPSPEED"
"""Variable that tells the process that workers are forked from whether they need DeepSpeed."""
NEEDS = "TRAINATOMY_NEEDS"
"""Variable of a process that was started early: the file from which it reads what workers need."""
_told: tuple[int, int] | None = None
"""Ends of the pipe to a process that was started early and has not been told yet what workers need."""


def start_early() -> None:
    """Start the process that workers are forked from before it is known what they need: it imports PyTorch meanwhile.

    Only on Linux, where another process can open a pipe of this one.
    """
    global _told
    server: Any = forkserver._forkserver
    if not Path("/proc/self/fd").exists() or server._forkserver_pid is not None:
        return
    _told = os.pipe()
    os.environ[NEEDS] = f"/proc/{os.getpid()}/fd/{_told[0]}"
    try:
        _ensure_server()
    finally:
        os.environ.pop(NEEDS)


def start_importing(jobs: int | None, hidden: Sequence[str] = (), *, deepspeed: bool = False) -> None:
    """Let the process that workers are forked from import the libraries, while this one prepares what to predict.

    Args:
        jobs: Number of processes; 1 is this process.
        hidden: Modules to hide from the workers.
        deepspeed: Whether the workers need DeepSpeed.
    """
    if jobs is not None and jobs > 1:
        os.environ[DEEPSPEED] = "1" if deepspeed else ""
        try:
            with hidden_in_workers(hidden):
                _start_server()
        finally:
            os.environ.pop(DEEPSPEED)


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
    """Let the process that workers are forked from import the libraries; start it unless it runs."""
    global _told
    if _told is not None:
        needs = os.environ.get(_HIDDEN, ""), os.environ.get(DEEPSPEED, "")
        os.write(_told[1], "\n".join((*needs, "")).encode())
        os.close(_told[1])  # the other end stays open for the process that may not have opened it yet
        _told = None
    _ensure_server()


def _ensure_server() -> None:
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


Item = TypeVar("Item")

KEPT_RUNS = 8
"""Runs that a process remembers, those that were used last; each takes a few MB."""


class RelatedProcesses:
    """Processes with a pool of their own each.

    Args:
        pools: Pools of one process each.
    """

    def __init__(self, pools: Sequence[ProcessPoolExecutor]) -> None:
        self._pools = pools
        self._remembered: list[deque[str]] = [deque(maxlen=KEPT_RUNS) for _ in pools]
        self._running: list[set[Future[Any]]] = [set() for _ in pools]

    def pick(self, kinships: Sequence[str | None]) -> int:
        """Return the place of the training to begin next.

        Args:
            kinships: What is equal for training runs with the same micro-batches; None for one without relatives.
        """
        free = set().union(*(self._remembered[place] for place in self._free()))
        busy = set().union(*self._remembered) - free
        preferred = (
            next((place for place, kinship in enumerate(kinships) if kinship in free), None),
            next((place for place, kinship in enumerate(kinships) if kinship not in busy), None),
        )
        return next((place for place in preferred if place is not None), 0)

    def submit(self, kinship: str | None, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin to call a function in a free process, if possible in one that remembers a related training."""
        places = self._free() or range(len(self._pools))
        place = min(places, key=lambda one: (kinship not in self._remembered[one], len(self._running[one])))
        future = self._pools[place].submit(function, *arguments)
        self._running[place].add(future)
        future.add_done_callback(self._running[place].discard)
        if kinship is not None:
            with suppress(ValueError):  # a new one
                self._remembered[place].remove(kinship)
            self._remembered[place].append(kinship)
        return future

    def call_all(
        self, function: Callable[[Item], Any], items: Sequence[Item], kinships: Sequence[str | None]
    ) -> list[Any]:
        """Return what a function returns for each item, in order.

        Args:
            function: Called in the processes.
            items: Its arguments; a free process takes the first that it is ready for.
            kinships: See ``pick``; one for each item.
        """
        waiting, running = list(range(len(items))), dict[Future[Any], int]()
        results: dict[int, Any] = {}
        while waiting or running:
            while waiting and len(running) < len(self._pools):
                place = waiting.pop(self.pick([kinships[each] for each in waiting]))
                running[self.submit(kinships[place], function, items[place])] = place
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                results[running.pop(future)] = future.result()
        return [results[place] for place in range(len(items))]

    def _free(self) -> list[int]:
        return [place for place, running in enumerate(self._running) if all(each.done() for each in list(running))]
