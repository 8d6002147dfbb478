"""The page in a real browser; needs gradio, playwright and Chromium, and is left out where one is missing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]
TINY = '{"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}'
PATIENCE = 120_000
"""Milliseconds: a machine may be busy, and the first prediction imports the libraries."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trainatomy", "app", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    found = f"http://127.0.0.1:{port}/"
    try:
        _wait(lambda: bool(urlopen(found, timeout=2)))
        yield found
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def _wait(is_there: Callable[[], bool], seconds: float = PATIENCE / 1000) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if is_there():
                return
        except OSError:
            pass
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def _opened(browser: Any, address: str, width: int) -> tuple[Any, list[str]]:
    """Open the link of a small training; return the page and what goes wrong in it."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(PATIENCE)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}?{urlencode({'config': TINY, 'gpu': 't4', 'batch': 2, 'length': 64})}")
    return page, wrong


@pytest.mark.parametrize("width", [400, 1600])
def test_a_link_is_predicted_when_it_opens(browser: Any, address: str, width: int) -> None:
    page, wrong = _opened(browser, address, width)
    page.wait_for_selector(".ta-figures")
    assert "T4" in page.inner_text(".ta-card")
    assert page.get_by_role("tab").all_inner_texts() == ["Report", "What fits", "GPUs", "Export"]
    frame = page.frame_locator("#ta-report iframe")
    page.locator("#ta-report iframe").evaluate("frame => frame.scrollIntoView()")
    frame.locator("[data-chart=timeline]").evaluate("chart => chart.scrollIntoView()")
    frame.locator("[data-chart=timeline][data-drawn=true]").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert wrong == []
    page.close()


def test_settings_are_tried_searched_and_exported(browser: Any, address: str) -> None:
    page, wrong = _opened(browser, address, 1600)
    page.wait_for_selector(".ta-figures")
    before = page.inner_text(".ta-card")
    slider = page.locator("input[type=range]").first
    slider.focus()
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    page.get_by_role("tab", name="Export").click()
    _wait(lambda: "per_device_train_batch_size=11" in page.inner_text("body"))
    assert page.inner_text(".ta-card") != before
    assert "batch=11" in page.locator("#ta-link textarea, #ta-link input").first.input_value()
    page.get_by_role("tab", name="What fits").click()
    page.get_by_role("button", name="Find settings that fit this GPU").click()
    page.frame_locator("#ta-fit iframe").get_by_text("candidates").first.wait_for()
    assert wrong == []
    page.close()
