"""Pools of processes, whose work this process does itself, at once and in order.

What a script computes there is its data. Each task is done when it is handed in, so that nothing waits.

Worker processes, whose work threads of this process do, and the queues between them.

A process that ends with its parent (``daemon=True``) prepares data for it: it packs samples, or augments batches. What
it computes on the CPU costs the script's own process nothing, and is not simulated.  One that needs a GPU is refused,
and so is a process that would outlive its parent.
"""

from __future__ import annotations

import itertools
import os
import queue
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, NoReturn

from trainatomy.scripts.imports import replace_everywhere
from trainatomy.scripts.standins.notes import StandIns


def install_workers(stand_ins: StandIns, refuse: Callable[..., NoReturn], libraries: Sequence[str]) -> None:
    """Put them in place in ``multiprocessing`` and its copies; refuse other processes."""

    def start(process: Any) -> None:
        if not process.daemon:
            refuse(process)
        process._popen = _Worker(process, refuse)
        process._sentinel = process._popen.sentinel
        process._popen.start()

    def start_threads(module: Any) -> None:
        stand_ins.put(module.BaseProcess, "start", start)

    def share_objects(module: Any) -> None:
        for name in ("Queue", "JoinableQueue"):
            original = getattr(module._default_context, name)
            stand_ins.put(module.BaseContext, name, lambda _, maxsize=0: _Queue(max(0, maxsize)))
            replace_everywhere(stand_ins.stack, [(original, getattr(module._default_context, name))])

    for library in libraries:
        stand_ins.when(f"{library}.process", start_threads)
        stand_ins.when(f"{library}.context", share_objects)


class _Worker(Thread):
    """A thread that is to its ``Process`` what ``Popen`` is.

    Args:
        process: The process.
        refuse: Refuses processes.

    Attributes:
        sentinel: Can be read from once the work is done.
        returncode: Status of the work; None until it is done.
    """

    def __init__(self, process: Any, refuse: Callable[..., NoReturn]) -> None:
        super().__init__(name=process.name, daemon=True)
        self._process, self._refuse, self._needs_gpu = process, refuse, False
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.sentinel, self._end = os.pipe()

    def run(self) -> None:
        """Do the work."""
        status = 1
        try:
            self._process.run()
            status = 0
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except Exception as error:
            self._needs_gpu = "cuda" in str(error).lower()  # there is none outside of the simulation
            if not self._needs_gpu:
                traceback.print_exc()
        finally:
            self._ended(status)

    def _ended(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
            os.close(self._end)

    def poll(self) -> int | None:
        """Return the status."""
        if self._needs_gpu:
            self._refuse(self._process)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the status once the work is done, or the time is over."""
        if self.returncode is None:
            self.join(timeout)
        return self.poll()

    def terminate(self) -> None:
        """Let it count as ended: a thread that waits for a queue stays there, and holds up nothing."""
        self._ended(-15)

    kill = terminate

    def close(self) -> None:
        """Close what says that it has ended."""
        os.close(self.sentinel)


class _Queue(queue.Queue[Any]):
    """A queue between threads with the methods of one between processes."""

    def close(self) -> None:
        """Do nothing."""

    join_thread = cancel_join_thread = close


_LIBRARIES = ("multiprocessing", "multiprocess")
"""Python's own, and the copy that ``datasets`` uses."""
_LOKY = ("joblib.externals.loky", "loky")
_EXECUTORS = ("concurrent.futures.process", *(f"{library}.process_executor" for library in _LOKY))
_TRACKERS = tuple(f"{library}.resource_tracker" for library in (*_LIBRARIES, *(f"{each}.backend" for each in _LOKY)))


def install(stand_ins: StandIns, refuse: Callable[..., NoReturn]) -> None:
    """Put them in place; refuse processes that are neither a pool's nor workers."""
    install_workers(stand_ins, refuse, _LIBRARIES)
    for library in _LIBRARIES:
        stand_ins.when(f"{library}.pool", partial(_install_pool, stand_ins))
        stand_ins.when(f"{library}.managers", partial(_install_managers, stand_ins))
    for name in _EXECUTORS:
        stand_ins.when(name, partial(_install_executor, stand_ins))
    for name in _TRACKERS:
        stand_ins.when(name, partial(_install_tracker, stand_ins))


class Done:
    """The result of a task that was done when it was handed in: ``AsyncResult``."""

    def __init__(self, task: Callable[[], Any], callback: Any = None, error_callback: Any = None) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        try:
            self._value = task()
        except Exception as error:
            self._error = error
            if error_callback is not None:
                error_callback(error)
        else:
            if callback is not None:
                callback(self._value)

    def get(self, timeout: float | None = None) -> Any:
        """Return what the task returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self, timeout: float | None = None) -> None:
        """Do nothing."""

    def ready(self) -> bool:
        """Return True."""
        return True

    def successful(self) -> bool:
        """Return whether the task raised nothing."""
        return self._error is None


class _Results:
    """What ``imap`` returns: an iterator with a method ``next`` that takes a timeout."""

    def __init__(self, results: Iterator[Any]) -> None:
        self._results = results

    def __iter__(self) -> _Results:
        return self

    def __next__(self) -> Any:
        return next(self._results)

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result."""
        return next(self._results)


class _InThisProcess:
    """What a pool does without processes: the methods that all others call."""

    def apply_async(
        self, func: Any, args: Any = (), kwds: Any = None, callback: Any = None, error_callback: Any = None
    ) -> Done:
        """Call a function."""
        return Done(lambda: func(*args, **(kwds or {})), callback, error_callback)

    def _map_async(
        self, func: Any, iterable: Iterable[Any], mapper: Any, chunksize: Any = None, callback: Any = None,
        error_callback: Any = None,
    ) -> Done:  # fmt: skip
        is_star = mapper is not None and getattr(mapper, "__name__", "") == "starmapstar"
        call = itertools.starmap if is_star else map
        return Done(lambda: list(call(func, iterable)), callback, error_callback)

    def imap(self, func: Any, iterable: Iterable[Any], chunksize: int = 1) -> _Results:
        """Call a function with each item, when its result is asked for."""
        return _Results(map(func, iterable))

    imap_unordered = imap

    def close(self) -> None:
        """Do nothing."""

    terminate = join = close

    def __exit__(self, *_: object) -> None: ...

    def __del__(self, *_: object, **__: object) -> None: ...


def _install_pool(stand_ins: StandIns, module: Any) -> None:
    """Let pools of processes have none; a pool of threads stays one."""
    original = module.Pool.__init__

    def make(
        self: Any, processes: Any = None, initializer: Any = None, initargs: Any = (), *rest: Any, **more: Any
    ) -> None:
        if isinstance(self, module.ThreadPool):
            original(self, processes, initializer, initargs, *rest, **more)
            return
        kind = type(self)
        self.__class__ = type(kind.__name__, (_InThisProcess, kind), {})
        self._ctx = more.get("context") or (rest[1] if len(rest) > 1 else None) or module.get_context()
        self._pool, self._state, self._processes = [], module.RUN, processes or 1
        if initializer is not None:
            initializer(*initargs)

    stand_ins.put(module.Pool, "__init__", make)


def _install_managers(stand_ins: StandIns, module: Any) -> None:
    """Let a manager hand out the objects themselves instead of proxies of objects in its process."""

    def start(self: Any, initializer: Any = None, initargs: Any = ()) -> None:
        if initializer is not None:
            initializer(*initargs)
        for name, (make, *_) in self._registry.items():
            if make is not None:
                setattr(self, name, make)
        self._state.value = module.State.STARTED
        self.shutdown = lambda: None

    stand_ins.put(module.BaseManager, "start", start)


def _install_executor(stand_ins: StandIns, module: Any) -> None:
    """Let an executor call what is submitted; its ``map`` submits."""

    def submit(*args: Any, **kwargs: Any) -> Future[Any]:
        executor, *rest = args
        function = rest.pop(0) if rest else kwargs.pop("fn")  # by name only in joblib's executor
        initializer, executor._initializer = getattr(executor, "_initializer", None), None
        if initializer is not None:
            initializer(*executor._initargs)
        future: Future[Any] = Future()
        try:
            future.set_result(function(*rest, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    stand_ins.put(module.ProcessPoolExecutor, "submit", submit)


def _install_tracker(stand_ins: StandIns, module: Any) -> None:
    """Let nothing be told to the process that removes what dead processes leave."""

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing."""

    for name in ("ensure_running", "_send"):
        stand_ins.put(module.ResourceTracker, name, nothing)
