"""What the server answers: requests of its own page, and no uploads, which the form does not have.

A page in another tab can send requests to a server on this machine, under its own name (DNS rebinding) or from its own
origin. Gradio keeps files that are uploaded, whoever sends them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

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
