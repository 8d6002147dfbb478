"""Answers of the worker process: limits, what is kept, the estimate, and what the page makes of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainatomy.app import workers as workers_module
from trainatomy.app.answers import Answer, Answers, Request
from trainatomy.app.form import Form
from trainatomy.app.page import card, estimated_bytes, framed, notice, waiting
from trainatomy.app.space import write_space
from trainatomy.app.workers import Turns, Workers
from trainatomy.errors import TrainatomyError
from trainatomy.runs import worker as worker_module
from trainatomy.runs.worker import Limits, Worker

TINY = '{"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}'


class Counting(Workers):
    """Answers with memory of 100 bytes and 10 a sample, without a process."""

    asked = 0

    def _compute(self, request: Request) -> Answer:
        self.asked += 1
        batch = json.loads(request.training)["train"].get("per_device_train_batch_size", 8)
        return Answer(device_bytes=100 + 10 * batch)


def _bill(form: Form) -> Request:
    return Request.of("bill", form.workload())


def test_an_answer_is_computed_once() -> None:
    worker = Counting()
    first = worker.ask(_bill(Form()))
    assert worker.ask(_bill(Form())) is first
    worker.ask(Request.of("report", Form().workload()))
    assert worker.asked == 2


def test_answers_that_are_kept_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "KEPT", 2)
    worker = Counting()
    for batch in (1, 2, 3):
        worker.ask(_bill(Form(batch=batch)))
    assert worker.known(_bill(Form(batch=1))) is None
    assert worker.known(_bill(Form(batch=3))) is not None


def test_an_estimate_needs_two_executed_batch_sizes_and_says_that_it_is_one() -> None:
    worker, form = Counting(), Form(batch=6)
    worker.ask(_bill(Form(batch=4)))
    assert estimated_bytes(worker, form) is None
    assert "stimate" not in waiting(worker, form)
    worker.ask(_bill(Form(batch=8)))
    assert estimated_bytes(worker, form) == 160
    assert "an estimate from other batch sizes" in waiting(worker, form)
    assert estimated_bytes(worker, replace(form, length=128)) is None


def test_a_prediction_has_figures_and_exports() -> None:
    form = Form(config=TINY, batch=2, length=16)
    found = Answers().answer(_bill(form))
    assert found.verdict == "fits" and found.device_bytes and found.report == ""
    python, file, options = found.exports
    assert "per_device_train_batch_size=2" in python
    assert "sequence_length: 16" in file
    assert options.startswith("trainatomy predict --")
    assert found.verdict in card(found)


def _sleep(connection: Any, answerer: Any, memory_bytes: int, niceness: int) -> None:
    time.sleep(60)


def _die(connection: Any, answerer: Any, memory_bytes: int, niceness: int) -> None:
    connection.recv()


@pytest.mark.parametrize(("serve", "said"), [(_sleep, "the limit here"), (_die, "ended unexpectedly")])
def test_a_request_beyond_its_limits_is_stopped(monkeypatch: pytest.MonkeyPatch, serve: Any, said: str) -> None:
    monkeypatch.setattr(worker_module, "get_context", _forking)
    monkeypatch.setattr(worker_module, "_serve", serve)
    worker = Worker[Answer](Answers, Limits(seconds=0.5))
    with pytest.raises(TrainatomyError, match=said):
        worker.compute(_bill(Form()))
    assert not worker.is_started  # the next request starts another


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


def _answer_slowly(connection: Any, answerer: Any, memory_bytes: int, niceness: int) -> None:
    """Answer with the batch size as memory: a search after a second, the rest at once."""
    while True:
        request = connection.recv()
        batch = json.loads(request.training)["train"].get("per_device_train_batch_size", 8)
        time.sleep(1.0 if request.is_search else 0.02)
        connection.send(Answer(device_bytes=batch))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(worker_module, "get_context", _forking)
    monkeypatch.setattr(worker_module, "_serve", _answer_slowly)
    workers = Workers()
    yield workers
    workers.close()


def test_a_prediction_does_not_wait_for_a_search(slow: Workers) -> None:
    search = Request.of("fit", Form().workload())
    with ThreadPoolExecutor() as pool:
        searched = pool.submit(slow.ask, search)
        while not slow.must_wait(search):
            time.sleep(0.001)
        assert slow.ask(_bill(Form(batch=3))).device_bytes == 3
        assert not searched.done()
        assert slow.must_wait(search) and not slow.must_wait(_bill(Form()))
    assert searched.result().device_bytes == 8


def test_requests_at_the_same_time_get_their_own_answers(slow: Workers) -> None:
    batches = [1 + number % 20 for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(slow.ask, [_bill(Form(batch=batch)) for batch in batches])
        assert [answer.device_bytes for answer in found] == batches


def test_a_request_of_two_visitors_is_computed_once_and_its_refusal_reaches_both() -> None:
    class Refusing(Counting):
        def _compute(self, request: Request) -> Answer:
            self.asked += 1
            time.sleep(0.2)
            raise TrainatomyError("no")

    workers = Refusing()
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(workers.ask, _bill(Form())) for _ in range(2)]
    assert [str(each.exception()) for each in asked] == ["no", "no"]
    assert workers.asked == 1
    with pytest.raises(TrainatomyError):
        workers.ask(_bill(Form()))
    assert workers.asked == 2  # a refusal is not kept


def test_a_report_follows_its_bill_without_a_second_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, form = Answers(), Form(config=TINY, batch=2, length=16)
    bill = answers.answer(_bill(form))
    monkeypatch.setattr("trainatomy.api.predict", None)
    report = answers.answer(Request.of("report", form.workload()))
    assert report.device_bytes == bill.device_bytes and 'data-chart="timeline"' in report.report


def test_a_search_hands_its_settings_to_the_form() -> None:
    form = Form(config=TINY, batch=1, length=16, gpu="t4", precision="fp32")
    found = Answers().answer(Request.of("fit", form.workload()))
    assert found.best is not None and "<html" in found.report
    assert "per_device_train_batch_size=" in found.exports[0]


def test_only_the_latest_prediction_of_a_visitor_is_shown() -> None:
    turns = Turns()
    first, other = turns.next("a"), turns.next("b")
    second = turns.next("a")
    assert not turns.is_latest("a", first)
    assert turns.is_latest("a", second) and turns.is_latest("b", other)
