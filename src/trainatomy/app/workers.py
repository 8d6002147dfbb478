"""The processes behind the page, some for predictions and others for searches, and the answers that they gave.

The latest prediction of each visitor: answers of earlier ones that arrive late are not shown.

What the server answers: requests of its own page, and no uploads, which the form does not have.

A page in another tab can send requests to a server on this machine, under its own name (DNS rebinding) or from its own
origin. Gradio keeps files that are uploaded, whoever sends them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any
from urllib.parse import urlsplit

from trainatomy.app.answers import Answer, Answers, Request
from trainatomy.runs.worker import Limits, Worker

VISITORS = 1000
"""Visitors that are remembered; of more, those who asked longest ago are forgotten."""


class Turns:
    """Numbers the predictions of each visitor."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._count = 0

    def next(self, visitor: str) -> int:
        """Return the number of a new prediction, which is the visitor's latest from now on."""
        with self._lock:
            self._count += 1
            self._latest[visitor] = self._count
            self._latest.move_to_end(visitor)
            if len(self._latest) > VISITORS:
                self._latest.popitem(last=False)
            return self._count

    def is_latest(self, visitor: str, turn: int) -> bool:
        """Return whether the visitor has asked for nothing since; a forgotten one has not."""
        with self._lock:
            return self._latest.get(visitor, turn) == turn


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine for itself."""


class Gate:
    """An ASGI application in front of another one, which gets only the requests that its own page makes."""

    def __init__(self, app: App, host: str) -> None:
        """Take the application, and the address that it is served on."""
        self._app = app
        self._names = LOCAL if host in LOCAL else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        reason = self._refusal(scope) if scope["type"] in ("http", "websocket") else ""
        if not reason:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": f"{reason}\n".encode()})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Message) -> str:
        """Return why a request is refused; an empty string if it is not."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._names is not None and urlsplit(f"//{host}").hostname not in self._names:
            return "this page is served on this machine only, as localhost"
        if origin is not None and urlsplit(origin).netloc != host:
            return "requests of other pages are not answered"
        return "this page takes no files" if scope["path"].rstrip("/").endswith("/upload") else ""


KEPT = 200
"""Answers that are kept."""


class Lane:
    """Some processes for requests of one kind; a request waits where all of them are busy."""

    def __init__(self, count: int, limits: Limits, *, is_urgent: bool) -> None:
        self._all = [Worker[Answer](Answers, limits, is_urgent) for _ in range(count)]
        self._idle = list(self._all)
        self._freed = Condition()

    @property
    def is_busy(self) -> bool:
        """True if a request would have to wait."""
        return not self._idle

    @contextmanager
    def worker(self, training: str) -> Iterator[Worker[Answer]]:
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
