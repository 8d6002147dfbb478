"""Copies of the last step, where the allocator's cache is not stable after those that are executed."""

from __future__ import annotations

import pytest

from trainatomy.allocator.replay import replay, unlimited_replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator import steps
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.simulator.steps import with_further_steps
from trainatomy.workload import Workload

MIB = 1 << 20
VIT = {
    "class": "ViTForImageClassification",
    "config": {"hidden_size": 640, "num_hidden_layers": 3, "num_attention_heads": 10, "intermediate_size": 1800},
}


def executed(**top: object) -> Simulation:
    train = {
        "per_device_train_batch_size": 10,
        "optim": "torch.optim.NAdam",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    }
    workload = Workload.from_mapping({"model": VIT, "train": train, "software": {"torch": "2.11"}, **top})
    return simulate(workload, workload.resolve_gpu(), operations=False)


def test_copies_are_what_executing_more_steps_writes() -> None:
    """Three steps are executed; an H200 held 1.1 MiB more from the fourth on."""
    found, longer = executed(), executed(steps=8)
    peaks, expected = replay(found.trace, AllocatorSettings()), replay(longer.trace, AllocatorSettings())
    steps = 1 + max(mark.step for mark in found.trace.marks)
    assert found.steps == 3 and 3 < steps < 8
    assert peaks.peak_allocated_bytes == expected.peak_allocated_bytes
    assert peaks.peak_reserved_bytes == expected.peak_reserved_bytes
    shorter = replay(executed(steps=3).trace, AllocatorSettings())
    assert shorter.peak_allocated_bytes < peaks.peak_allocated_bytes
    count = len(found.trace.events)
    assert [event[:1] + event[2:] for event in found.trace.events[:count]] == [
        event[:1] + event[2:] for event in longer.trace.events[:count]
    ]


def repeated(sizes: list[int], steps: int) -> AllocationTrace:
    """Return a trace of steps that allocate some sizes and release them in the same order."""
    trace = AllocationTrace()
    for step in range(steps):
        trace.marks.append(Mark(len(trace.events), "step", step))
        first = len(trace.origins)
        trace.origins += [Origin("aten::empty", "", "forward", step)] * len(sizes)
        trace.events += [Event("alloc", first + place, size) for place, size in enumerate(sizes)]
        trace.marks.append(Mark(len(trace.events), "backward end", step))
        trace.events += [Event("free", first + place, 0) for place in range(len(sizes))]
        trace.marks.append(Mark(len(trace.events), "step end", step))
    return trace


def test_a_stable_cache_needs_no_copies() -> None:
    trace = repeated([30 * MIB, 50 * MIB], 3)
    assert with_further_steps(trace, AllocatorSettings()) is trace


@pytest.mark.parametrize("steps", [0, 1])
def test_a_single_step_says_nothing_about_the_next(steps: int) -> None:
    trace = repeated([30 * MIB], steps)
    assert with_further_steps(trace, AllocatorSettings()) is trace


def test_steps_that_allocate_nothing_need_no_copies() -> None:
    trace = repeated([], 3)
    assert with_further_steps(trace, AllocatorSettings()) is trace


def test_the_replay_without_copies_is_that_of_the_trace() -> None:
    trace, settings = repeated([30 * MIB, 50 * MIB], 3), AllocatorSettings()
    with_further_steps(trace, settings)
    assert unlimited_replay(trace, settings, 0) is trace.replayed["replay", len(trace.events), settings, None]
    assert unlimited_replay(trace, settings, 0) == replay(repeated([30 * MIB, 50 * MIB], 3), settings)


def test_long_steps_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    play = steps._play
    monkeypatch.setattr(steps, "_play", lambda *arguments: (tried.append(1), play(*arguments))[1])
    with_further_steps(growing(3, evaluates=False), AllocatorSettings())
    assert len(tried) > 1
    tried.clear()
    monkeypatch.setattr(steps, "MOST_EVENTS", 1)
    with_further_steps(growing(3, evaluates=False), AllocatorSettings())
    assert len(tried) == 1


def test_steps_that_keep_more_and_more_are_left_alone() -> None:
    trace = repeated([30 * MIB], 3)
    trace.events = [event for event in trace.events if event.action == "alloc"]
    trace.marks = [mark._replace(event=min(mark.event, mark.step + (mark.name != "step"))) for mark in trace.marks]
    assert with_further_steps(trace, AllocatorSettings()) is trace


def growing(steps: int, *, evaluates: bool) -> AllocationTrace:
    """Return a trace whose reserved memory grows after its third step, with an evaluation after its last one.

    What each step keeps until the next one lies between what it releases.
    """
    trace = AllocationTrace()

    def allocate(size: int, phase: str, step: int) -> int:
        trace.origins.append(Origin("aten::empty", "", phase, step))
        trace.events.append(Event("alloc", len(trace.origins) - 1, size))
        return len(trace.origins) - 1

    def free(*numbers: int) -> None:
        trace.events.extend(Event("free", number, 0) for number in numbers)

    kept: list[int] = []
    for step in range(steps):
        trace.marks.append(Mark(len(trace.events), "step", step))
        made = [allocate(size * MIB, "forward", step) for size in (16, 12, 48, 30)]
        trace.marks.append(Mark(len(trace.events), "backward end", step))
        free(made[0], *kept, *made[2:])
        kept = [made[1], *(allocate(size * MIB, "other", step) for size in (35, 44))]
        trace.marks.append(Mark(len(trace.events), "step end", step))
    if evaluates:
        trace.marks.append(Mark(len(trace.events), "evaluation", steps - 1))
        free(kept[0])
        outputs = [allocate(size * MIB, "evaluation", steps - 1) for size in (24, 90)]
        free(*outputs)
        trace.marks.append(Mark(len(trace.events), "evaluation end", steps - 1))
    return trace


def test_an_evaluation_after_the_last_step_comes_after_the_copies() -> None:
    peaks = {steps: replay(growing(steps, evaluates=True), AllocatorSettings()) for steps in (3, 12)}
    found = with_further_steps(growing(3, evaluates=True), AllocatorSettings())
    steps = 1 + max(mark.step for mark in found.marks if mark.name == "step end")
    assert steps > 3 and peaks[3].peak_reserved_bytes < peaks[12].peak_reserved_bytes
    assert [mark.name for mark in found.marks][-2:] == ["evaluation", "evaluation end"]
    assert replay(found, AllocatorSettings()).peak_reserved_bytes == peaks[12].peak_reserved_bytes
    expected = growing(steps, evaluates=True)
    assert [event[:1] + event[2:] for event in found.events] == [event[:1] + event[2:] for event in expected.events]
