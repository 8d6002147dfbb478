"""Pools of processes, whose work this process does itself, at once and in order.

What a script computes there is its data. Each task is done when it is handed in, so that nothing waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

from trainatomy.scripts.standins import workers
from trainatomy.scripts.standins.notes import StandIns

_LIBRARIES = ("multiprocessing", "multiprocess")
"""Python's own, and the copy that ``datasets`` uses."""
_LOKY = ("joblib.externals.loky", "loky")
_EXECUTORS = ("concurrent.futures.process", *(f"{library}.process_executor" for library in _LOKY))
_TRACKERS = tuple(f"{library}.resource_tracker" for library in (*_LIBRARIES, *(f"{each}.backend" for each in _LOKY)))


def install(stand_ins: StandIns, refuse: Callable[..., NoReturn]) -> None:
    """Put them in place; refuse processes that are neither a pool's nor workers."""
    workers.install(stand_ins, refuse, _LIBRARIES)
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
