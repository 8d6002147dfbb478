"""The server answers its own page alone: no foreign host or origin, and no uploads."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from trainatomy.app.page import check_address
from trainatomy.app.workers import Gate
from trainatomy.errors import TrainatomyError


def status(path: str = "/", *, host: str = "127.0.0.1", kind: str = "http", **headers: str) -> int:
    """Return the status with which a gate answers a request; 200 stands for the page behind it."""
    sent: list[Any] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Gate(page, host)({"type": kind, "path": path, "headers": given}, receive, send))
    return int(sent[0].get("status", sent[0].get("code")))


@pytest.mark.parametrize("name", ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "LOCALHOST"])
def test_the_own_page_is_answered(name: str) -> None:
    assert status(host="127.0.0.1", Host=name) == 200
    assert status("/gradio_api/queue/join", Host=name, Origin=f"http://{name}") == 200
    assert status(kind="lifespan") == 200


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example:7860", "localhost@evil.example", ""])
def test_a_foreign_name_of_this_machine_is_refused(name: str) -> None:
    assert status(Host=name) == 403
    assert status(kind="websocket", Host=name) == 1008


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "gpu.example"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_requests_of_other_pages_are_refused(host: str, origin: str) -> None:
    assert status("/gradio_api/queue/join", host=host, Host="127.0.0.1:7860", Origin=origin) == 403


def test_a_server_for_others_has_any_name() -> None:
    assert status(host="0.0.0.0", Host="user-trainatomy.hf.space", Origin="https://user-trainatomy.hf.space") == 200


@pytest.mark.parametrize("path", ["/gradio_api/upload", "/upload", "/gradio_api/upload/"])
def test_files_are_not_taken(path: str) -> None:
    assert status(path, Host="127.0.0.1:7860") == 403


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("nonsense.invalid", None, r"--host nonsense.invalid: no address of this machine"),
        ("203.0.113.1", 7860, r"--host 203.0.113.1: no address of this machine"),
    ],
)
def test_a_host_of_others_is_named_at_once(host: str, port: int | None, message: str) -> None:
    with pytest.raises(TrainatomyError, match=message):
        check_address(host, port)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TrainatomyError, match=rf"--port {port}: cannot be used"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    check_address("localhost", None)
