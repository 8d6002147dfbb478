"""The processes behind the page, some for predictions and others for searches, and the answers that they gave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock

from trainatomy.app.answers import Answer, Request
from trainatomy.app.worker import Limits, Worker

KEPT = 200
"""Answers that are kept."""


class Lane:
    """Some processes for requests of one kind; a request waits where all of them are busy."""

    def __init__(self, count: int, limits: Limits, *, is_urgent: bool) -> None:
        self._all = [Worker(limits, is_urgent) for _ in range(count)]
        self._idle = list(self._all)
        self._freed = Condition()

    @property
    def is_busy(self) -> bool:
        """True if a request would have to wait."""
        return not self._idle

    @contextmanager
    def worker(self, training: str) -> Iterator[Worker]:
        """Yield an idle worker, best the one that has just executed this training."""
        with self._freed:
            self._freed.wait_for(lambda: self._idle)
            worker = max(self._idle, key=lambda each: (each.last == training, each.is_started))
            self._idle.remove(worker)
        try:
            yield worker
        finally:
            with self._freed:
                self._idle.append(worker)
                self._freed.notify()

    def start(self) -> None:
        """Start one process; the others start when they are needed."""
        with self.worker("") as worker:
            worker.start()

    def close(self) -> None:
        """End the processes."""
        for worker in self._all:
            worker.close()


@dataclass
class Workers:
    """Processes for the requests of all visitors; each request is computed once."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[Request, Answer] = OrderedDict()
        self._running: dict[Request, Future[Answer]] = {}
        self._predictions = Lane(self.limits.predictions, self.limits, is_urgent=True)
        self._searches = Lane(self.limits.searches, self.limits, is_urgent=False)

    def known(self, request: Request) -> Answer | None:
        """Return an answer that was already given, else None."""
        with self._lock:
            if request in self._known:
                self._known.move_to_end(request)
            return self._known.get(request)

    def must_wait(self, request: Request) -> bool:
        """Return whether a request waits for those of other visitors."""
        return self._lane(request).is_busy

    def ask(self, request: Request) -> Answer:
        """Return the answer to a request, computed in a process unless it is known or somebody asked for it already.

        Raises:
            TrainatomyError: That of the request, or the process exceeded a limit.
        """
        if (kept := self.known(request)) is not None:
            return kept
        with self._lock:
            running = self._running.get(request)
            if running is None:
                own = self._running[request] = Future[Answer]()
        if running is not None:
            return running.result()
        try:
            own.set_result(self._compute(request))
        except BaseException as error:
            own.set_exception(error)
        with self._lock:
            del self._running[request]
            if own.exception() is None:
                self._known[request] = own.result()
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return own.result()

    def start(self) -> None:
        """Start a process of each kind, which import the libraries while the visitor still reads the page."""
        self._predictions.start()
        self._searches.start()

    def close(self) -> None:
        """End all processes."""
        self._predictions.close()
        self._searches.close()

    def _compute(self, request: Request) -> Answer:
        with self._lane(request).worker(request.training) as worker:
            return worker.compute(request)

    def _lane(self, request: Request) -> Lane:
        return self._searches if request.is_search else self._predictions
