"""The benchmark of the overhead of a watch, with a fake clock and a fake allocator."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_allocator import FakeAllocator
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILE = Path(__file__).parents[2] / "lab" / "watch.py"


@pytest.fixture(scope="module")
def watch_overhead() -> ModuleType:
    spec = importlib.util.spec_from_file_location("watch_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class FakeClock:
    """Clock on which a step takes 10 ms times a changing load, and longer while it is watched."""

    def __init__(self) -> None:
        self.now = 0.0
        self._steps = 0
        self._watched = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.now += 5.0  # starting and stopping takes time outside of the steps
        self._watched = self._steps
        self._share, self._first = 0.02, 0.5
        yield
        self._share = self._first = 0.0
        self.now += 5.0

    _share = _first = 0.0

    def step(self) -> None:
        busy = 1 + (self._steps // 240) % 3  # whole rounds
        share = self._first if self._steps - self._watched < 2 else self._share
        self.now += 0.01 * busy * (1 + share)
        self._steps += 1


def test_the_overhead_compares_watched_steps_with_their_neighbours(
    watch_overhead: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(watch_overhead.time, "perf_counter", lambda: clock.now)
    ways = {watch_overhead.UNWATCHED: nullcontext, "watch": clock.watched}
    rounds = watch_overhead.measure(clock.step, ways, 7, 10, lambda: None)
    found = watch_overhead.cost("watch", rounds)
    assert found.overhead == pytest.approx(0.02) and found.first == pytest.approx(0.5)
    assert found.interval == pytest.approx((0.02, 0.02)) and found.verdict == "kept"
    assert "| watch | " in watch_overhead.report(rounds, ["watch"]) and "+2.00%" in watch_overhead.report(
        rounds, ["watch"]
    )


def test_a_noisy_overhead_is_undecided(watch_overhead: ModuleType) -> None:
    def one(watched: float) -> dict[str, Any]:
        plain, other = ((seconds,) * 5 for seconds in (1.0, watched))
        return {
            watch_overhead.UNWATCHED: watch_overhead.Stretch(plain, plain),
            "watch": watch_overhead.Stretch(plain, other),
        }

    noisy = [one(1 + share) for share in (0.0, 0.1, 0.2, 0.1, 0.3)]
    assert watch_overhead.cost("watch", noisy).verdict.startswith("undecided")
    assert watch_overhead.cost("watch", [one(1.1)] * 7).verdict == "broken"
    assert watch_overhead.cost("watch", [one(0.99)]).verdict == "kept"


def test_steps_that_other_work_slowed_do_not_count(watch_overhead: ModuleType) -> None:
    disturbed, plain = (1.02, 1.02, 9.0, 4.0, 2.0), (1.0, 1.0, 1.0, 1.0, 7.0)
    rounds = [
        {
            watch_overhead.UNWATCHED: watch_overhead.Stretch(plain, plain),
            "watch": watch_overhead.Stretch(plain, disturbed),
        }
    ] * 6
    assert watch_overhead.cost("watch", rounds).overhead == pytest.approx(0.02)


def small_training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return two layers, their optimizer and a step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_all_variants_alternate_and_restore_everything(
    watch_overhead: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = FakeAllocator()
    allocator.install(monkeypatch)
    model, optimizer, step = small_training()
    with allocator:
        ways = watch_overhead.ways_of(model, optimizer)
        rounds = watch_overhead.measure(step, ways, 2, 3, lambda: None)
    assert [set(one) for one in rounds] == [set(ways)] * 2
    assert all(min(stretch.later) > 0 for one in rounds for stretch in one.values())
    begun = [options for options in allocator.recordings if options["enabled"] is not None]
    assert [options["context"] for options in begun].count("all") == 2 and len(begun) == 6
    assert not allocator.recording and not model._forward_hooks
    assert len(watch_overhead.report(rounds, ["watch", "history"]).splitlines()) == 6


def test_by_its_parts_it_counts_what_is_written_and_noted(
    watch_overhead: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watch_overhead.Parts(1000, 2e-7, 1e-4)
    assert found.seconds == pytest.approx(3e-4)
    rounds = [{name: watch_overhead.Stretch((0.03,) * 2, (0.03,) * 6) for name in (watch_overhead.UNWATCHED, "watch")}]
    last_line = watch_overhead.report(rounds, ["watch"], found).splitlines()[-1]
    assert "0.30 ms of a step, 1.00%" in last_line and "1,000 allocations and releases at 200 ns" in last_line


def test_the_parts_are_those_of_a_watched_step(watch_overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    allocator.install(monkeypatch)
    monkeypatch.setattr(watch_overhead, "_pairs", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model, optimizer, step = small_training()
    with allocator:
        found = watch_overhead.parts(model, optimizer, step)
    assert found.pairs > 0 and found.notes_seconds > 0 and not allocator.recording


def test_a_missing_gpu_is_reported(watch_overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="finds no GPU"):
        watch_overhead.main([])


def test_the_training_updates_the_weights(watch_overhead: ModuleType) -> None:
    from argparse import Namespace

    options = Namespace(layers=1, hidden=64, batch=2, length=4)
    model, _, step = watch_overhead.training(options, "cpu")
    before = next(model.parameters()).detach().clone()
    step()
    assert not torch.equal(before, next(model.parameters()))
