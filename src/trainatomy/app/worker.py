"""A process that answers requests within limits of time and memory, and is replaced when it exceeds them."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from trainatomy.app.answers import Answer, Task, answer
from trainatomy.errors import TrainatomyError
from trainatomy.workload.schema import Workload

KEPT = 200
"""Answers that are kept."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take.

    Attributes:
        seconds: Time of one request.
        memory_bytes: Memory that the process may hold.
    """

    seconds: float = 120.0
    memory_bytes: int = 8 * 1024**3


@dataclass
class Worker:
    """One process for the requests of all visitors, one after the other, and the answers that it gave."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[tuple[Task, str], Answer] = OrderedDict()
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None

    def known(self, task: Task, workload: Workload) -> Answer | None:
        """Return an answer that was already given, else None."""
        return self._known.get(_key(task, workload))

    def ask(self, task: Task, workload: Workload) -> Answer:
        """Return the answer to a request, computed in the process unless it is known.

        Raises:
            TrainatomyError: That of the request, or the process exceeded a limit.
        """
        with self._lock:
            if (kept := self.known(task, workload)) is not None:
                return kept
            found = self._compute(task, workload)
            if isinstance(found, TrainatomyError):
                raise found
            self._known[_key(task, workload)] = found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            return found

    def start(self) -> None:
        """Start the process, which imports the libraries while the visitor still reads the page."""
        with self._lock:
            self._opened()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _compute(self, task: Task, workload: Workload) -> Answer | TrainatomyError:
        connection = self._opened()
        try:
            connection.send((task, workload.to_mapping()))
            if not connection.poll(self.limits.seconds):
                self.close()
                raise TrainatomyError(
                    f"This took longer than {self.limits.seconds:.0f} s, the limit of this page, and was stopped. "
                    "The command line has no limit."
                )
            found: Answer | TrainatomyError = connection.recv()
        except (EOFError, OSError):
            self.close()
            raise TrainatomyError(
                f"The prediction ended unexpectedly; it may hold {self.limits.memory_bytes / 1024**3:.0f} GiB of host "
                "memory here. The command line has no limit."
            ) from None
        return found

    def _opened(self) -> Connection[Any, Any]:
        if self._connection is not None and self._process.is_alive():
            return self._connection
        self.close()
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self.limits.memory_bytes), daemon=True)
        self._process.start()
        other.close()
        return self._connection


def _key(task: Task, workload: Workload) -> tuple[Task, str]:
    return task, repr(workload.to_mapping())


def _serve(connection: Connection[Any, Any], memory_bytes: int) -> None:
    """Answer requests until the page ends."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.dup2(2, 1)
    import trainatomy.runs.preload  # noqa: F401

    while True:
        try:
            task, mapping = connection.recv()
        except EOFError:
            return
        try:
            connection.send(answer(task, mapping))
        except TrainatomyError as error:
            connection.send(TrainatomyError(str(error)))
        except MemoryError:
            os._exit(1)
        except Exception as error:  # a visitor must get an answer, and the next one a working page
            connection.send(TrainatomyError(f"The prediction failed: {type(error).__name__}: {error}"))
