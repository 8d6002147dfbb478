"""Threads of a script: what its own code and that of frameworks does in them is simulated like the rest.

PyTorch's modes belong to a thread, so that they are entered in each one whose function is neither Python's nor
PyTorch's.  Threads take turns where they wait for each other, and else keep the processor: an operation that is being
recorded is not interrupted by another one.  An exception that ends the dry run in a thread ends the script.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainatomy.scripts.places import is_of_platform, is_users, place_of
from trainatomy.training.signals import wrapped

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess

_TURN = 5.0
"""Seconds after which a thread that does not wait for anything lets others run."""


class Threads:
    """Follows the threads of a dry run.

    Args:
        process: The simulated process.
        ends: Exceptions that end the dry run.

    Attributes:
        ending: The exception that ended the dry run in a thread.
        failed: What the last thread that failed raised.
    """

    def __init__(self, process: SimulatedProcess, ends: tuple[type[BaseException], ...]) -> None:
        self._process, self._ends = process, ends
        self._turn = sys.getswitchinterval()
        self.ending: BaseException | None = None
        self.failed: Exception | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the threads that are started in the block."""
        item: Any = executors._WorkItem
        try:
            with (
                wrapped(threading.Thread, "start", self._around_start),
                wrapped(threading.Thread, "join", self._around_join),
                wrapped(item, "run", self._around_work),
            ):
                yield
        finally:
            sys.setswitchinterval(self._turn)

    def _around_start(self, original: Callable[..., Any], thread: threading.Thread) -> None:
        function = getattr(thread, "_target", None) or type(thread).run
        if not is_of_platform(_file_of(function)):
            run = thread.run
            thread.run = lambda: self._run(run)  # type: ignore[method-assign]
        original(thread)

    def _around_join(self, original: Callable[..., Any], thread: threading.Thread, *limit: Any, **named: Any) -> None:
        original(thread, *limit, **named)
        if self.ending is not None and threading.current_thread() is threading.main_thread():
            raise self.ending

    def _around_work(self, original: Callable[..., Any], item: Any) -> None:
        if not is_users(_file_of(getattr(item, "fn", None) or getattr(item, "task", (None,))[0])):
            original(item)
            return
        with self._entered():
            original(item)  # which keeps what the function raises for the thread that asks for its result

    def _run(self, run: Callable[[], None]) -> None:
        """Run a thread's function; what ends the dry run ends the main thread, too."""
        try:
            with self._entered():
                run()
        except self._ends as error:
            self.ending = error
            if callable(signal.getsignal(signal.SIGALRM)):  # which raises ``ending`` in the main thread
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        except Exception as error:
            self.failed = error
            print(f"{place_of(error)} raised {type(error).__name__} in a thread: {error}", file=sys.stderr)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Simulate what this thread does in the block."""
        sys.setswitchinterval(_TURN)
        with self._process.recorder, self._process.functions:
            yield


def _file_of(function: Any) -> str:
    """Return the file of a function; a name that is none's for one in C."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return "<C>" if code is None else code.co_filename
