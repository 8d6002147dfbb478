"""Answers of the worker process: limits, what is kept, the estimate, and what the page makes of them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainatomy.app import worker as worker_module
from trainatomy.app.answers import Answer, answer
from trainatomy.app.estimate import estimated_bytes
from trainatomy.app.form import Form
from trainatomy.app.page import card, framed, notice, waiting
from trainatomy.app.space import write_space
from trainatomy.app.worker import Limits, Worker
from trainatomy.errors import TrainatomyError

TINY = '{"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}'


class Counting(Worker):
    """Answers with memory of 100 bytes and 10 a sample, without a process."""

    asked = 0

    def _compute(self, task: Any, workload: Any) -> Answer:
        self.asked += 1
        return Answer(device_bytes=100 + 10 * workload.train.per_device_train_batch_size)


def test_an_answer_is_computed_once() -> None:
    worker = Counting()
    first = worker.ask("bill", Form().workload())
    assert worker.ask("bill", Form().workload()) is first
    worker.ask("report", Form().workload())
    assert worker.asked == 2


def test_answers_that_are_kept_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "KEPT", 2)
    worker = Counting()
    for batch in (1, 2, 3):
        worker.ask("bill", Form(batch=batch).workload())
    assert worker.known("bill", Form(batch=1).workload()) is None
    assert worker.known("bill", Form(batch=3).workload()) is not None


def test_an_estimate_needs_two_executed_batch_sizes_and_says_that_it_is_one() -> None:
    worker, form = Counting(), Form(batch=6)
    worker.ask("bill", Form(batch=4).workload())
    assert estimated_bytes(worker, form) is None
    assert "stimate" not in waiting(worker, form)
    worker.ask("bill", Form(batch=8).workload())
    assert estimated_bytes(worker, form) == 160
    assert "an estimate from other batch sizes" in waiting(worker, form)
    assert estimated_bytes(worker, replace(form, length=128)) is None


def test_a_prediction_has_figures_and_exports() -> None:
    form = Form(config=TINY, batch=2, length=16)
    found = answer("bill", form.workload().to_mapping())
    assert found.verdict == "fits" and found.device_bytes and found.report == ""
    python, file, options = found.exports
    assert "per_device_train_batch_size=2" in python
    assert "sequence_length: 16" in file
    assert options.startswith("trainatomy predict --")
    assert found.verdict in card(found)


def _sleep(connection: Any, memory_bytes: int) -> None:
    time.sleep(60)


def _die(connection: Any, memory_bytes: int) -> None:
    connection.recv()


@pytest.mark.parametrize(("serve", "said"), [(_sleep, "limit of this page"), (_die, "ended unexpectedly")])
def test_a_request_beyond_its_limits_is_stopped(monkeypatch: pytest.MonkeyPatch, serve: Any, said: str) -> None:
    monkeypatch.setattr(worker_module, "get_context", _forking)
    monkeypatch.setattr(worker_module, "_serve", serve)
    worker = Worker(Limits(seconds=0.5))
    with pytest.raises(TrainatomyError, match=said):
        worker.ask("bill", Form().workload())
    assert worker._process is None  # the next request starts another


def _forking(method: str) -> Any:
    """Return processes that inherit the patched function; nothing of torch runs in them."""
    from multiprocessing import get_context

    return get_context("fork")


def test_text_of_visitors_is_escaped() -> None:
    assert "<script>" not in notice("<script>") + card(Answer(sentence="<script>"))
    assert '"><script>' not in framed(Answer(report='"><script>'))


def test_a_space_has_what_the_hub_asks_for(tmp_path: Path) -> None:
    folder = tmp_path / "space"
    assert {path.name for path in write_space(folder)} == {"README.md", "requirements.txt", "app.py"}
    header = (folder / "README.md").read_text().split("---")[1]
    assert "sdk: gradio" in header and "app_file: app.py" in header
    assert "trainatomy[app" in (folder / "requirements.txt").read_text()
    compile((folder / "app.py").read_text(), "app.py", "exec")
    with pytest.raises(TrainatomyError, match=r"README\.md exists"):
        write_space(folder)
