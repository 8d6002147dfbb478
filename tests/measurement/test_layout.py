"""Replay of a history that begins in the middle of a process, compared with the allocator's counters."""

from __future__ import annotations

import random

import pytest
from simulated_memory import SimulatedMemory

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import Workspaces
from trainatomy.integrations import windows as windows_module
from trainatomy.integrations.windows import WindowedHistory
from trainatomy.measurement.step.recorder import AllocatorCounters
from trainatomy.measurement.traces.breakdown import UNEXPLAINED, AllocatorSetup, MeasuredTotals, measured_breakdown
from trainatomy.measurement.traces.history import AllocationHistory
from trainatomy.measurement.traces.layout import BlockLayout, release_on_request, replay_history
from trainatomy.measurement.traces.trace import to_trace

MIB = 2**20
NO_WORKSPACES = Workspaces(0, 0, False)
OPTIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "max_split_size_mb:64,garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
)
SIZES = (1, 513, 40_000, MIB, MIB + 1, 3 * MIB, 9 * MIB + 7, 11 * MIB, 19 * MIB, 37 * MIB + 512, 70 * MIB)


class Program:
    """Allocates and frees at random."""

    def __init__(self, memory: SimulatedMemory, seed: int) -> None:
        self._memory, self._random = memory, random.Random(seed)

    def run(self, events: int) -> None:
        for _ in range(events):
            self._act(self._random.random())

    def _act(self, chance: float) -> None:
        live = self._memory.live
        if chance < 0.01:
            self._memory.empty_cache()
        elif chance < 0.05:
            self._memory.arrive()
        elif live and chance < 0.05 + min(0.9, len(live) / 40):
            self._memory.free(self._random.choice(live), waits=chance < 0.1)
        else:
            size = self._random.choice(SIZES)
            self._memory.alloc(self._random.randint(max(1, size // 2), size))


@pytest.fixture(params=OPTIONS)
def settings(request: pytest.FixtureRequest) -> AllocatorSettings:
    return AllocatorSettings.parse(request.param, (2, 11))


def watched(memory: SimulatedMemory, program: Program, events: int) -> tuple[windows_module.Window, AllocatorCounters]:
    """Run ``events`` events and return the window of the peak."""
    memory.reset_peaks()
    recording = WindowedHistory(0)
    recording.start(counted(memory), {})
    for _ in range(events // 20):
        program.run(20)
        if recording.is_full(now := counted(memory)):
            recording.keep(now, [], [])
            recording.start(now, {})
    now = counted(memory)
    window = recording.window(now, [], [])
    recording.stop()
    return window, now


def counted(memory: SimulatedMemory) -> AllocatorCounters:
    found = memory.statistics()
    calls = found["allocation"]["all"]
    return AllocatorCounters(calls["allocated"] + calls["freed"], found["allocated_bytes"]["all"]["peak"])


@pytest.mark.parametrize("seed", range(6))
def test_a_watch_that_begins_in_the_middle_is_exact(
    monkeypatch: pytest.MonkeyPatch, settings: AllocatorSettings, seed: int
) -> None:
    memory = SimulatedMemory(settings, 600 * MIB)
    memory.install(monkeypatch)
    program = Program(memory, seed)
    program.run(150 * (seed % 3))
    window, _ = watched(memory, program, 200)
    history = window.history()
    trace = to_trace(release_on_request(history))
    found = replay_history(history, trace, settings, window.segments)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (memory.peak, memory.peak_reserved)
    assert (found.allocated_bytes[-1], found.reserved_bytes[-1]) == (memory.allocated, memory.reserved)
    totals = MeasuredTotals(memory.peak, memory.peak_reserved, None, None, 0)
    breakdown = measured_breakdown(
        history, AllocatorSetup(settings, NO_WORKSPACES), totals, (), segments=window.segments
    )
    parts = breakdown.memory.components.as_dict()
    assert sum(parts.values()) == memory.peak_reserved and parts["cache"] == memory.peak_reserved - memory.peak
    assert UNEXPLAINED not in {line.name for line in breakdown.memory.lines}
    assert sum(line.bytes for line in breakdown.memory.lines) == memory.peak


@pytest.mark.parametrize("seed", range(4))
def test_the_peak_is_exact_in_whichever_window_it_is(
    monkeypatch: pytest.MonkeyPatch, settings: AllocatorSettings, seed: int
) -> None:
    monkeypatch.setattr(windows_module, "WINDOW_EVENTS", 50)
    memory = SimulatedMemory(settings, 600 * MIB)
    memory.install(monkeypatch)
    program = Program(memory, seed)
    program.run(100)
    window, _ = watched(memory, program, 500)
    history = window.history()
    found = replay_history(history, to_trace(release_on_request(history)), settings, window.segments)
    assert found.peak_allocated_bytes == memory.peak


def test_a_history_of_the_user_s_is_followed_from_the_beginning_of_the_watch(
    monkeypatch: pytest.MonkeyPatch, settings: AllocatorSettings
) -> None:
    memory = SimulatedMemory(settings, 600 * MIB)
    memory.install(monkeypatch)
    memory.record(enabled="all")
    for seed in range(8):
        program = Program(memory, seed)
        program.run(30)
        window, _ = watched(memory, program, 100)
        assert window.is_complete
        history = window.history()
        found = replay_history(history, to_trace(release_on_request(history)), settings, window.segments)
        assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (memory.peak, memory.peak_reserved)


def test_a_truncated_history_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "RING_EVENTS", 100)
    memory = SimulatedMemory(AllocatorSettings())
    memory.install(monkeypatch)
    program = Program(memory, 1)
    assert watched(memory, program, 20)[0].is_complete
    assert not watched(memory, program, 400)[0].is_complete


def test_expandable_segments_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimulatedMemory(AllocatorSettings.parse("expandable_segments:True", (2, 11)), 600 * MIB)
    memory.install(monkeypatch)
    program = Program(memory, 3)
    program.run(100)
    window, _ = watched(memory, program, 200)
    history = window.history()
    found = replay_history(history, to_trace(release_on_request(history)), AllocatorSettings(), window.segments)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (memory.peak, memory.peak_reserved)


def test_a_block_that_another_stream_uses_is_neither_allocated_nor_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimulatedMemory(AllocatorSettings())
    memory.install(monkeypatch)
    first = memory.alloc(4 * MIB)
    assert first is not None
    memory.free(first, waits=True)
    memory.reset_peaks()
    recording = WindowedHistory(0)
    recording.start(counted(memory), {})
    second = memory.alloc(4 * MIB)
    assert second is not None and second != first
    memory.arrive()
    window = recording.window(counted(memory), [], [])
    history = window.history()
    trace = to_trace(release_on_request(history))
    found = replay_history(history, trace, AllocatorSettings(), window.segments)
    assert [event.action for event in trace.events] == ["alloc"]
    assert found.peak_allocated_bytes == 4 * MIB and found.peak_reserved_bytes == 20 * MIB


def test_a_history_with_gaps_is_replayed_as_far_as_possible() -> None:
    layout = BlockLayout(AllocatorSettings())
    assert layout.allocate(4096, 1000) == 1024  # of no known segment
    assert layout.allocate(4096, 600) == 1024, "its release is missing: the range is free again, too small to be split"
    assert not layout.request_release(77) and not layout.release(77)
    layout.shrink(77, 10)
    assert layout.allocated == 1024
    assert (
        replay_history(
            AllocationHistory({}, []), to_trace(AllocationHistory({}, [])), AllocatorSettings()
        ).peak_allocated_at
        is None
    )
