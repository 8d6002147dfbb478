"""Worker processes, whose work threads of this process do, and the queues between them.

A process that ends with its parent (``daemon=True``) prepares data for it: it packs samples, or augments batches. What
it computes on the CPU costs the script's own process nothing, and is not simulated.  One that needs a GPU is refused,
and so is a process that would outlive its parent.
"""

from __future__ import annotations

import os
import queue
import traceback
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, NoReturn

from trainatomy.scripts.imports import replace_everywhere
from trainatomy.scripts.standins.notes import StandIns


def install(stand_ins: StandIns, refuse: Callable[..., NoReturn], libraries: Sequence[str]) -> None:
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
