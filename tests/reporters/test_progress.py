"""Progress on stderr where it is no terminal: a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from measured import RESULT

from trainatomy.cli import progress
from trainatomy.cli.progress import ComparisonProgress, SearchProgress, follow_measurement
from trainatomy.measurement.process.job import Progress
from trainatomy.runs.plan import Finished, Plan
from trainatomy.workload.schema import Workload

Lines = Callable[[str], list[str]]


@pytest.fixture
def lines_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Return a function that waits for a line with some text and returns all lines so far."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    seen: list[str] = []

    def wait(text: str) -> list[str]:
        until = time.monotonic() + 10
        while not any(text in line for line in seen):
            assert time.monotonic() < until, seen
            time.sleep(0.01)
            seen.extend(capsys.readouterr().err.splitlines())
        return seen

    return wait


def test_a_search_says_what_it_executed_and_the_best_so_far(lines_with: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "total_rate", lambda prediction: 12.34)
    best: Any = SimpleNamespace(prediction=None, point=(8,))
    with SearchProgress("bert") as search:
        lines_with("bert: starting")
        search.executed(1, None)
        lines_with("bert: 1 candidate executed")
        search.executed(3, best)
        lines_with("bert: 3 candidates executed, best so far batch 8 with 12.3 samples/s")
    count = len(lines_with("bert"))
    time.sleep(0.1)
    assert len(lines_with("bert")) == count


def test_a_comparison_says_what_is_done_what_runs_and_the_best_so_far(lines_with: Lines) -> None:
    model = {"class": "GPT2LMHeadModel"}
    workloads = tuple(
        Workload.from_mapping({"model": model, "name": name, "parallel": {"gpus": gpus}, "loop": "pytorch"})
        for name, gpus in (("one", 1), ("two", 2), ("three", 1))
    )
    with ComparisonProgress() as observer:
        lines_with("predicting")
        observer.planned(Plan(workloads, "group"))
        observer.starting(0, 0)
        observer.progress(Progress("control", "training", 3, 10))
        lines_with("0 of 3 runs done; one: control run: training, step 3 of 10")
        for row in range(2):
            observer.finished(Finished(row, 0, replace(RESULT, samples_per_second=10.0 - row)))
        observer.starting(2, 0)
        lines_with("2 of 3 runs done; three; best so far two with 18 samples/s")


def test_a_measurement_says_each_stage_once_and_its_steps_every_few_seconds(lines_with: Lines) -> None:
    with follow_measurement() as tell:
        tell(Progress("control", "model loaded", device_bytes=2**30))
        tell(Progress("control", "training", 7, 100, 2**30))
        found = lines_with("control run: training, step 7 of at most 100 (1.00 GiB on the GPU)")
    assert found.count("control run: training (1.00 GiB on the GPU)") == 1
