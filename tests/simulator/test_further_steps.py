"""Copies of the last step, where the allocator's cache is not stable after those that are executed."""

from __future__ import annotations

import pytest

from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator.further_steps import with_further_steps
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
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


def test_steps_that_keep_more_and_more_are_left_alone() -> None:
    trace = repeated([30 * MIB], 3)
    trace.events = [event for event in trace.events if event.action == "alloc"]
    trace.marks = [mark._replace(event=min(mark.event, mark.step + (mark.name != "step"))) for mark in trace.marks]
    assert with_further_steps(trace, AllocatorSettings()) is trace
