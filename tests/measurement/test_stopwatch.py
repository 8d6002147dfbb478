"""CUDA events that the GPU completes late or never."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import FakeEvent

from trainatomy.measurement.step.instruments import Stopwatch


class LateEvent(FakeEvent):
    """Event that the GPU completes later; a broken GPU raises at every query."""

    passed = 0
    broken = False

    def query(self) -> bool:
        if LateEvent.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.at <= LateEvent.passed


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(FakeEvent, "count", 0)
    monkeypatch.setattr(LateEvent, "passed", 0)
    return Stopwatch()


def test_a_step_is_read_once_the_gpu_has_passed_its_end(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch.tick()
    stopwatch.finish()
    assert stopwatch.seconds == []
    for _ in range(3):
        stopwatch.tick()
    assert stopwatch.seconds == []
    monkeypatch.setattr(LateEvent, "passed", 3)
    stopwatch.tick()
    assert stopwatch.seconds == [0.5, 0.5]
    monkeypatch.setattr(LateEvent, "passed", 5)
    stopwatch.finish()
    assert stopwatch.seconds == [0.5] * 4


def test_after_an_error_of_cudas_what_was_read_stays(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateEvent, "passed", 2)
    for _ in range(3):
        stopwatch.tick()
    monkeypatch.setattr(LateEvent, "broken", True)
    stopwatch.finish()
    assert stopwatch.seconds == [0.5]


@pytest.mark.parametrize("device", [None, 1])
def test_timestamps_are_those_of_the_working_gpu(
    stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch, device: int | None
) -> None:
    stamp = LateEvent(enable_timing=True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: stamp)
    Stopwatch(device).tick()
    assert stamp.stream == f"stream of {device}"
