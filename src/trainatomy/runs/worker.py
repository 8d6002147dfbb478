"""A process that answers requests within limits of time and memory, and is replaced when it exceeds them."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

from trainatomy.errors import TrainatomyError
from trainatomy.processes import ending_blocked, ignore_interrupts

_LESS_URGENT = 10
"""Niceness of processes that search, so that predictions do not wait for them on a machine with few cores."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request.

    Attributes:
        seconds: Time of one request.
        memory_bytes: Memory that each process may hold.
        predictions: Processes that predict.
        searches: Processes that search for settings, or predict on every GPU.
    """

    seconds: float = 120.0
    memory_bytes: int = 8 * 1024**3
    predictions: int = 2
    searches: int = 1


class Answerer(Protocol):
    """Something that answers requests, made once in the process."""

    def answer(self, request: Any, /) -> Any:
        """Return the answer to a request; raise TrainatomyError."""


Answer = TypeVar("Answer")


@dataclass(eq=False)
class Worker(Generic[Answer]):
    """One process, which answers one request after the other; for one thread at a time.

    Attributes:
        answerer: Class of what answers, made in the process without arguments.
        limits: Limits of each request.
        is_urgent: Whether it runs before processes of searches.
        last: Key of its last request; the report of a training that it has just predicted needs no second execution.
    """

    answerer: type[Answerer]
    limits: Limits = field(default_factory=Limits)
    is_urgent: bool = True
    last: str = ""

    def __post_init__(self) -> None:
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process, which imports the libraries while nobody has asked yet."""
        self._opened()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self.last = ""

    def compute(self, request: Any) -> Answer:
        """Return the answer to a request.

        Raises:
            TrainatomyError: That of the request, or the process exceeded a limit.
        """
        connection = self._opened()
        try:
            connection.send(request)
            if not connection.poll(self.limits.seconds):
                self.close()
                raise TrainatomyError(
                    f"This took longer than {self.limits.seconds:.0f} s, the limit here, and was stopped. "
                    "The command line has no limit."
                )
            found = connection.recv()
        except (EOFError, OSError):
            self.close()
            raise TrainatomyError(
                f"The prediction ended unexpectedly; it may hold {self.limits.memory_bytes / 1024**3:.0f} GiB of host "
                "memory here. The command line has no limit."
            ) from None
        if isinstance(found, TrainatomyError):
            raise found
        self.last = getattr(request, "training", "")
        answer: Answer = found
        return answer

    def _opened(self) -> Connection[Any, Any]:
        if self._connection is not None and self._process.is_alive():
            return self._connection
        self.close()
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        niceness = 0 if self.is_urgent else _LESS_URGENT
        arguments = (other, self.answerer, self.limits.memory_bytes, niceness)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with ending_blocked():
            self._process.start()
        other.close()
        return self._connection


def _serve(connection: Connection[Any, Any], answerer: type[Answerer], memory_bytes: int, niceness: int) -> None:
    """Answer requests until the process that asks ends."""
    ignore_interrupts()
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.nice(niceness)
    os.dup2(2, 1)
    import_module("trainatomy.runs.preload")

    answers = answerer()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(answers.answer(request))
        except TrainatomyError as error:
            connection.send(TrainatomyError(str(error)))
        except MemoryError:
            os._exit(1)
        except Exception as error:  # whoever asks must get an answer, and the next one a working process
            connection.send(TrainatomyError(f"The prediction failed: {type(error).__name__}: {error}"))
