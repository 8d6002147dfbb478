"""Live views on a terminal, and nothing where there is none."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from trainatomy.cli import output
from trainatomy.cli.progress import SearchProgress
from trainatomy.integrations import watch
from trainatomy.integrations.watch import LiveView
from trainatomy.measurement.step.recorder import AllocatorCounters


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False, color_system=None)


def drawn(paper: Console) -> str:
    assert isinstance(paper.file, io.StringIO)
    return re.sub(r"\x1b\[[\d?;]*[a-zA-Z]", "", paper.file.getvalue())


def test_a_watched_training_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    paper, now = terminal(), iter([1.0, 1.1, 3.0])
    view = LiveView("net", 10, paper)
    view.start()
    monkeypatch.setattr(watch.time, "monotonic", lambda: next(now))
    for steps in (1, 2, 5):  # the second is too soon after the first
        view.step_ended(steps, AllocatorCounters(0, 5 * 2**20))
    view.stop()
    text = drawn(paper)
    assert "net" in text and "1/10" in text and "5/10" in text and "2/10" not in text
    assert "peak 5.0 MiB allocated, 500 ms per step" in text


def test_nothing_is_drawn_into_a_file() -> None:
    paper = Console(file=io.StringIO(), width=120)
    view = LiveView("net", 10, paper)
    view.start()
    view.step_ended(1, AllocatorCounters(0, 1))
    view.stop()
    assert drawn(paper) == ""


def test_a_prediction_shows_stage_and_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = terminal()
    monkeypatch.setattr(output, "error_paper", lambda: paper)
    with output.progress("simulating net") as tell:
        tell("order 1 of 3 [seed]")
    text = drawn(paper)
    assert "simulating net: order 1 of 3 [seed]" in text
    assert re.search(r"0:00:00 [\d.]+ (MiB|GiB) of host memory", text)


def test_a_search_counts_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = terminal()
    monkeypatch.setattr("trainatomy.cli.progress.error_paper", lambda: paper)
    with SearchProgress("net") as view:
        found: Any = None
        view.executed(3, found)
    assert "net: 3 candidates executed" in drawn(paper)
