"""What the observer of a run reads when, and how long it goes on: on a GPU and a clock from a script."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import FakeEvent

from trainatomy.measurement.device.meter import Meter
from trainatomy.measurement.step import watch as watching
from trainatomy.measurement.step.watch import EnoughSteps, Patience, Watch


class Host:
    """A clock that only ``step`` moves, and the waits for the GPU."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", found.wait)
    monkeypatch.setattr(watching.time, "perf_counter", lambda: found.now)
    return found


def run(watch: Watch, host: Host, seconds: float, most: int) -> bool:
    """Up to ``most`` steps of so many ``seconds``; whether the watch said that they are enough."""
    try:
        for step in range(most):
            watch.step_begin(step)
            host.now += seconds
            watch.step_end(step)
    except EnoughSteps:
        return True
    finally:
        watch.over()
    return False


@pytest.mark.parametrize("warm_up", [2, 7])
@pytest.mark.parametrize(("seconds", "timed"), [(1.0, 8), (0.25, 12), (0.001, 93)])
def test_steps_are_timed_until_they_are_enough_and_took_long_enough(
    host: Host, warm_up: int, seconds: float, timed: int
) -> None:
    watch = Watch(Meter(None, alone=True), warm_up=warm_up, patience=Patience(warm_up + 93, warm_up + 8, 3.0))
    assert run(watch, host, seconds, warm_up + 93) is (timed < 93)
    assert (watch.steps, len(watch.timed), host.waits) == (warm_up + timed, timed, warm_up)
    assert watch.step_seconds == 0.5  # as the stamps say, not the host


@pytest.mark.parametrize(("steps", "timed"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_few_steps_have_few_times(host: Host, steps: int, timed: int) -> None:
    watch = Watch(Meter(None, alone=True), patience=Patience(steps, steps, 0.0))
    assert not run(watch, host, 1.0, steps)
    assert (watch.steps, len(watch.timed)) == (steps, timed)
    assert watch.step_seconds == (0.5 if timed else None)


def test_a_long_warm_up_is_not_time_that_was_measured(host: Host) -> None:
    watch = Watch(Meter(None, alone=True), warm_up=7, patience=Patience(100, 5, 3.0))
    assert run(watch, host, 2.0, 100)
    assert watch.steps == 9  # two of 2 s after the warm-up
