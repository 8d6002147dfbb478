"""Optimizer steps that gradient scaling skips: rewriting a trace is what executing them writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.api import predict
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.results.memory import SkippedSteps, totals_of_run
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.simulator.steps import BEGIN, END, makes_states, with_skipped_steps
from trainatomy.training.run import CountedSteps
from trainatomy.workload import Workload

VIT = {
    "class": "ViTForImageClassification",
    "config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}


@contextmanager
def skipping(count: int) -> Iterator[None]:
    """Let gradient scaling skip the first ``count`` steps, as it does where gradients overflow."""
    decisions = 0

    def decide(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal decisions
        decisions += 1
        sum(value.item() for value in state["found_inf_per_device"].values())
        return None if decisions <= count else optimizer.step(*args, **kwargs)

    with mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", decide):
        yield


def executed(steps: int, loop: str = "pytorch", **train: object) -> Simulation:
    settings = {"per_device_train_batch_size": 2, "fp16": True, **train}
    mapping = {"model": VIT, "train": settings, "loop": loop, "software": {"torch": "2.11"}, "steps": steps}
    workload = Workload.from_mapping(mapping)
    return simulate(workload, workload.resolve_gpu(), operations=False)


def written(trace: AllocationTrace) -> list[tuple[Any, ...]]:
    """Return the events with their origins and labels, in which numbers of allocations do not matter."""
    order: dict[int, int] = {}
    found = []
    for event in trace.events:
        place = order.setdefault(event.allocation, len(order))
        about = trace.origins[event.allocation] if event.action == "alloc" else None
        label = trace.labels.get(event.allocation) if event.action == "alloc" else None
        found.append((event.action, place, event.bytes, event.stream, about, label))
    return found


@pytest.mark.parametrize(
    ("count", "loop", "train"),
    [
        (1, "pytorch", {"optim": "sgd", "optim_args": "momentum=0.9"}),
        (2, "pytorch", {"optim": "adamw_torch", "gradient_accumulation_steps": 2}),
        (1, "pytorch", {"optim": "torch.optim.Adafactor"}),
        (1, "trainer", {"optim": "adamw_torch"}),
        (2, "trainer", {"optim": "adamw_torch"}),
    ],
)
def test_a_rewritten_trace_is_what_execution_writes(count: int, loop: str, train: dict[str, object]) -> None:
    plain = executed(count + 2, loop, **train)
    with skipping(count):
        expected = executed(count + 2, loop, **train)
    assert makes_states(plain.trace)
    found = with_skipped_steps(plain.trace, count)
    assert written(found) == written(expected.trace)
    assert [mark for mark in found.marks if mark.name not in (BEGIN, END)] == [
        mark for mark in expected.trace.marks if mark.name not in (BEGIN, END)
    ]


def test_copies_of_the_last_step_stand_in_for_steps_that_were_not_executed() -> None:
    train = {"optim": "sgd", "optim_args": "momentum=0.9"}
    with skipping(4):
        expected = replay(executed(6, **train).trace, AllocatorSettings())
    found = replay(with_skipped_steps(executed(3, **train).trace, 4), AllocatorSettings())
    assert found.peak_allocated_bytes == expected.peak_allocated_bytes
    assert found.peak_reserved_bytes == expected.peak_reserved_bytes


def test_fused_and_plain_optimizers_have_no_states_that_come_later() -> None:
    fused = executed(3, optim="adamw_torch_fused", max_grad_norm=0.0)
    assert with_skipped_steps(fused.trace, 1) is fused.trace
    plain = executed(3, optim="sgd")
    assert not makes_states(plain.trace)


def test_a_prediction_says_what_skipped_steps_change() -> None:
    mapping: dict[str, Any] = {
        "model": {
            "class": VIT["class"],
            "config": {"hidden_size": 640, "num_hidden_layers": 3, "num_attention_heads": 10},
        },
        "train": {"per_device_train_batch_size": 24, "fp16": True, "optim": "sgd", "optim_args": "momentum=0.9"},
        "loop": "pytorch",
        "software": {"torch": "2.11"},
    }
    plain = predict(Workload.from_mapping(mapping), timed=False).memory
    first = plain.skipped_steps[0]
    asked = predict(Workload.from_mapping({**mapping, "skipped_steps": 1}), timed=False).memory
    assert first.steps == 1 and asked.skipped_steps == ()
    assert (first.allocated_bytes, first.reserved_bytes) == (asked.peak_allocated_bytes, asked.peak_reserved_bytes)
    assert (first.allocated_bytes, first.reserved_bytes) != (plain.peak_allocated_bytes, plain.peak_reserved_bytes)
    assert predict(Workload.from_mapping(mapping), timed=False, layouts=False).memory.skipped_steps == ()


def traced(*events: tuple[str, int]) -> AllocationTrace:
    """Return three equal steps, of which the second half is the optimizer's; allocations count within a step."""
    trace = AllocationTrace()
    for step in range(3):
        first = len(trace.origins)
        trace.marks.append(Mark(len(trace.events), "step", step))
        trace.marks.append(Mark(len(trace.events), "backward end", step))
        for place, (action, number) in enumerate(events):
            if place == len(events) // 2:
                trace.marks.append(Mark(len(trace.events), BEGIN, step))
            if action == "alloc":
                trace.origins.append(Origin("aten::empty", "", "other", step))
            trace.events.append(Event(action, first + number, 512 if action == "alloc" else 0))  # type: ignore[arg-type]
        trace.marks.append(Mark(len(trace.events), END, step))
        trace.marks.append(Mark(len(trace.events), "step end", step))
    return trace


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([("alloc", 0), ("alloc", 1), ("free", 1), ("free", 0)], "releases memory that it did not allocate"),
        ([("alloc", 0), ("free", 0), ("alloc", 1), ("alloc", 2)], "keeps more memory in later steps"),
    ],
)
def test_optimizers_that_reach_beyond_their_step_are_refused(events: list[tuple[str, int]], reason: str) -> None:
    with pytest.raises(SimulationError, match=reason):
        with_skipped_steps(traced(*events), 1)


def test_what_no_gradient_scaling_decides_about_is_refused() -> None:
    mapping: dict[str, Any] = {"model": VIT, "skipped_steps": 1}
    with pytest.raises(WorkloadError, match="needs train"):
        Workload.from_mapping(mapping)
    with pytest.raises(WorkloadError, match="must be fewer than steps"):
        Workload.from_mapping({**mapping, "train": {"fp16": True}, "steps": 1})
    with pytest.raises(WorkloadError, match="not simulated with data"):
        Workload.from_mapping({**mapping, "train": {"fp16": True}, "data": {"lengths": [5, 9]}})


def test_a_run_is_compared_with_the_steps_that_it_skipped() -> None:
    totals = {"peak_allocated_bytes": 10, "peak_reserved_bytes": 20, "device_bytes": 25}
    known = [SkippedSteps(1, 11, 21), SkippedSteps(2, 12, 22)]
    assert totals_of_run(totals, known, None) == totals_of_run(totals, known, 0) == totals
    assert list(totals_of_run(totals, known, 1).values()) == [11, 21, 26]
    assert totals_of_run(totals, known, 7) == totals_of_run(totals, known, 2)
    alternating = [*known, SkippedSteps(3, 11, 21), SkippedSteps(4, 12, 22)]
    assert [totals_of_run(totals, alternating, count)["peak_allocated_bytes"] for count in (4, 5, 6)] == [12, 11, 12]


def test_first_skipped_steps_are_counted() -> None:
    seen = CountedSteps()
    assert seen.count is None
    for taken in (False, False, True, False):
        seen.decided(taken)
    assert seen.count == 2
