"""Step timing and the length of a run, with a fake GPU and a fake clock."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeEvent

from trainatomy.measurement.device.meter import Meter
from trainatomy.measurement.step import timer as timers
from trainatomy.measurement.step.timer import EnoughSteps, StepLimit, StepTimer


class FakeClock:
    """Clock that only ``run`` advances; it counts synchronisations."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", found.wait)
    monkeypatch.setattr(timers.time, "perf_counter", lambda: found.now)
    return found


def run(timer: StepTimer, clock: FakeClock, seconds: float, most: int) -> bool:
    """Run up to ``most`` steps of ``seconds`` each; return whether the timer ended the run."""
    try:
        for step in range(most):
            timer.step_begin(step)
            clock.now += seconds
            timer.step_end(step)
    except EnoughSteps:
        return True
    finally:
        timer.finish()
    return False


@pytest.mark.parametrize("warm_up", [2, 7])
@pytest.mark.parametrize(("seconds", "timed"), [(1.0, 8), (0.25, 12), (0.001, 93)])
def test_steps_are_timed_until_they_are_enough_and_took_long_enough(
    clock: FakeClock, warm_up: int, seconds: float, timed: int
) -> None:
    timer = StepTimer(Meter(None, is_exclusive=True), warm_up=warm_up, limit=StepLimit(warm_up + 93, warm_up + 8, 3.0))
    assert run(timer, clock, seconds, warm_up + 93) is (timed < 93)
    assert (timer.steps, len(timer.timed_seconds), clock.waits) == (warm_up + timed, timed, warm_up)
    assert timer.step_seconds == 0.5  # by CUDA events, not by the CPU clock


@pytest.mark.parametrize(("steps", "timed"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_few_steps_have_few_times(clock: FakeClock, steps: int, timed: int) -> None:
    timer = StepTimer(Meter(None, is_exclusive=True), limit=StepLimit(steps, steps, 0.0))
    assert not run(timer, clock, 1.0, steps)
    assert (timer.steps, len(timer.timed_seconds)) == (steps, timed)
    assert timer.step_seconds == (0.5 if timed else None)


def test_a_long_warm_up_is_not_time_that_was_measured(clock: FakeClock) -> None:
    timer = StepTimer(Meter(None, is_exclusive=True), warm_up=7, limit=StepLimit(100, 5, 3.0))
    assert run(timer, clock, 2.0, 100)
    assert timer.steps == 9  # two of 2 s after the warm-up


def test_timed_steps_wait_while_a_file_is_locked(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "quiet"
    timer = StepTimer(Meter(None, is_exclusive=True), limit=StepLimit(3, 3, 0.0, quiet=path))
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        training = threading.Thread(target=run, args=(timer, clock, 1.0, 3))
        training.start()
        training.join(0.3)
        assert (timer.steps, training.is_alive()) == (timer.warm_up, True)
    training.join(20)
    assert timer.steps == 3


def test_a_file_that_is_gone_is_not_waited_for(clock: FakeClock, tmp_path: Path) -> None:
    timer = StepTimer(Meter(None, is_exclusive=True), limit=StepLimit(3, 3, 0.0, quiet=tmp_path / "quiet"))
    assert not run(timer, clock, 1.0, 3)


def test_no_step_is_timed_after_the_limit(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers.time, "monotonic", lambda: clock.now)
    timer = StepTimer(Meter(None, is_exclusive=True), limit=StepLimit(100, 100, 0.0, until=5.5))
    assert run(timer, clock, 1.0, 100)
    assert (timer.steps, len(timer.timed_seconds), timer.is_late) == (6, 4, True)
    late = StepTimer(Meter(None, is_exclusive=True), limit=StepLimit(100, 100, 0.0, until=0.0))
    assert run(late, clock, 1.0, 100)
    assert len(late.timed_seconds) == 1
