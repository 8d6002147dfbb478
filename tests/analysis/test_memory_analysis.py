"""Memory breakdowns of allocation traces and the verdict about fitting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces_by_hand import GIB, KIB, MIB, TraceBuilder, one_step

import trainatomy
import trainatomy.prediction.assemble
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.detail import memory_timeline
from trainatomy.analysis.memory import (
    COMPONENTS,
    LABELLED,
    OTHER_COMPONENTS,
    TIGHT_SHARE,
    MemoryAnalysis,
    analyze_memory,
    verdict,
)
from trainatomy.results.memory import Instant
from trainatomy.results.trace import AllocationTrace

DEFAULT = AllocatorSettings()
CONTEXT = 500 * MIB
PHASES = ["load", "forward", "recompute", "backward", "optimizer", "other"]
TINY_BERT = {
    "class": "BertForSequenceClassification",
    "config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
}
MARKS = ["loaded", "forward end", "recompute end"]


def test_memory_breakdown_of_one_step() -> None:
    trace, _ = one_step()
    analysis = analyze_memory(trace, DEFAULT, 10 * GIB, CONTEXT)
    memory = analysis.memory
    assert memory.peak == Instant(0, "backward", "", "aten::empty")
    parts = {name: size for name, size in memory.components.as_dict().items() if name not in ("cache", "context")}
    assert parts == {
        "weights": 4 * MIB,
        "optimizer_states": 0,
        "gradients": 4 * MIB,
        "activations": 8 * MIB,
        "temporary": 8 * MIB,
        "functionality": 3 * KIB,
    }
    assert memory.peak_allocated_bytes == memory.peak_requested_bytes == 24 * MIB + 3 * KIB
    assert memory.model_bytes == 4 * MIB
    assert memory.device_bytes == memory.peak_reserved_bytes + CONTEXT
    assert analysis.out_of_memory is None
    assert verdict(memory, 10 * GIB, None) == "fits"


def test_blocks_are_counted_not_requests() -> None:
    builder = TraceBuilder()
    builder.allocate(1, "load", "weight")
    memory = analyze_memory(builder.trace, DEFAULT, GIB, 0).memory
    assert (memory.peak_requested_bytes, memory.components.weights, memory.components.cache) == (1, 512, 2 * MIB - 512)


def test_an_empty_trace_holds_only_the_context() -> None:
    analysis = analyze_memory(AllocationTrace(), DEFAULT, GIB, CONTEXT)
    assert analysis.memory.device_bytes == analysis.memory.components.context == CONTEXT
    assert analysis.memory.peak.step == -1
    assert analysis.memory.lines == analysis.modules == ()


def too_much() -> AllocationTrace:
    builder = TraceBuilder()
    builder.allocate(400 * MIB, "load", "weight")
    builder.mark("loaded")
    builder.allocate(200 * MIB, "forward", module="encoder", step=1)
    builder.allocate(600 * MIB, "backward", module="head", step=1)
    return builder.trace


def test_out_of_memory_names_the_place_and_shows_the_whole_training() -> None:
    analysis = analyze_memory(too_much(), DEFAULT, GIB, 100 * MIB)
    point = analysis.out_of_memory
    assert point is not None
    assert point.instant == Instant(1, "backward", "head", "aten::empty")
    assert (point.requested_bytes, point.allocated_bytes, point.reserved_bytes) == (600 * MIB, 600 * MIB, 600 * MIB)
    assert analysis.memory.peak_allocated_bytes == 1200 * MIB
    assert analysis.memory.components.total_bytes == 1300 * MIB
    assert verdict(analysis.memory, GIB, point) == "does not fit"


def test_what_does_not_fit_is_shown_as_on_the_smallest_gpu_on_which_it_runs() -> None:
    """Check a sum that grows by new blocks, whose freed ones nothing else fits."""
    builder = TraceBuilder()
    held = builder.allocate(100 * MIB)
    for count in range(2, 12):
        larger = builder.allocate(count * 100 * MIB)
        builder.free(held)
        held = larger
    found = analyze_memory(builder.trace, DEFAULT, GIB, CONTEXT)
    memory = found.memory
    assert found.out_of_memory is not None and memory.peak_allocated_bytes == 2100 * MIB
    assert memory.components.total_bytes == memory.device_bytes == CONTEXT + memory.peak_reserved_bytes
    assert 0 <= memory.components.cache < 0.1 * memory.peak_allocated_bytes
    assert max(found.reserved_bytes) == memory.peak_reserved_bytes
    needed = analyze_memory(builder.trace, DEFAULT, memory.device_bytes, CONTEXT)
    assert needed.out_of_memory is None and needed.memory == memory
    assert analyze_memory(builder.trace, DEFAULT, int(0.98 * memory.device_bytes), CONTEXT).out_of_memory is not None
    assert found.driver_calls == analyze_memory(builder.trace, DEFAULT, 100 * GIB, CONTEXT).driver_calls


def test_the_context_reduces_the_available_memory() -> None:
    assert analyze_memory(too_much(), DEFAULT, 1300 * MIB, 100 * MIB).out_of_memory is None
    assert analyze_memory(too_much(), DEFAULT, 1300 * MIB, 102 * MIB).out_of_memory is not None


def test_nothing_fits_if_the_context_exceeds_the_gpu() -> None:
    point = analyze_memory(too_much(), DEFAULT, 90 * MIB, 100 * MIB).out_of_memory
    assert point is not None
    assert (point.instant.phase, point.allocated_bytes) == ("load", 0)


def test_a_training_that_needs_retries_is_tight() -> None:
    builder = TraceBuilder()
    builder.free(builder.allocate(400 * MIB))
    builder.allocate(500 * MIB)
    roomy, scarce = (analyze_memory(builder.trace, DEFAULT, gpu, 0) for gpu in (GIB, 600 * MIB))
    assert verdict(roomy.memory, GIB, None) == "fits"
    assert (scarce.out_of_memory, scarce.memory.num_alloc_retries) == (None, 1)
    assert scarce.memory.peak_reserved_bytes == 500 * MIB  # the first segment went back to the driver
    assert verdict(scarce.memory, 600 * MIB, None) == "tight"


def test_a_training_may_fit_because_a_library_skips_a_workspace() -> None:
    builder = TraceBuilder()
    builder.allocate(300 * MIB, "load", "weight")
    for step in range(2):
        workspace = builder.allocate(200 * MIB, "backward", step=step)
        builder.trace.choices[workspace] = 0
        builder.free(workspace)
    analysis = analyze_memory(builder.trace, DEFAULT, 400 * MIB, 0)
    assert (analysis.out_of_memory, analysis.skipped_workspaces) == (None, (2,))  # of the last step
    assert analysis.memory.peak_allocated_bytes == analysis.memory.peak_requested_bytes == 300 * MIB
    assert verdict(analysis.memory, 400 * MIB, None) == "tight"
    assert analyze_memory(builder.trace, DEFAULT, 500 * MIB, 0).skipped_workspaces == ()


def test_tight_is_a_share_of_the_gpus_memory() -> None:
    memory = analyze_memory(one_step()[0], DEFAULT, GIB, 0).memory
    gpu = 100 * GIB
    room = int(TIGHT_SHARE * gpu)
    assert verdict(replace(memory, device_bytes=gpu - room), gpu, None) == "fits"
    assert verdict(replace(memory, device_bytes=gpu - room + 1), gpu, None) == "tight"


@st.composite
def traces(draw: Any) -> AllocationTrace:
    """Generate any order of allocations, frees and marks, with any labels."""
    builder, held = TraceBuilder(), []
    sizes = st.integers(0, 4 * KIB) | st.integers(0, 30 * MIB)
    labels = st.none() | st.sampled_from([*LABELLED, "a workspace"])
    for action in draw(st.lists(st.sampled_from("tttggme"), max_size=50)):
        if action == "t":
            phase = draw(st.sampled_from(PHASES))
            held.append(
                builder.allocate(draw(sizes), phase, draw(labels), draw(st.sampled_from(["", "h.0", "h.1.mlp"])))
            )
        elif action == "g" and held:
            builder.free(held.pop(draw(st.integers(0, len(held) - 1))))
        elif action == "m":
            builder.mark(draw(st.sampled_from(MARKS)))
        elif action == "e":
            builder.empty_cache()
    return builder.trace


@given(
    traces(),
    st.sampled_from(["", "expandable_segments:True", "roundup_power2_divisions:4"]),
    st.integers(1, 400),
    st.sampled_from([0, 30]),
)
def test_components_add_up_to_the_byte(trace: AllocationTrace, conf: str, gpu: int, nccl: int) -> None:
    """For any trace, whether or not it fits (a GPU of 1 to 400 MiB, a context of 20 MiB, perhaps NCCL's 30)."""
    analysis = analyze_memory(trace, AllocatorSettings.parse(conf, (2, 11)), gpu * MIB, 20 * MIB, nccl * MIB)
    memory = analysis.memory
    parts = memory.components.as_dict()
    assert sum(parts.values()) == memory.components.total_bytes == memory.device_bytes
    assert memory.device_bytes == memory.peak_reserved_bytes + (20 + nccl) * MIB
    assert parts.get("nccl", 0) == nccl * MIB
    assert min(parts.values()) >= 0
    tensors = [name for name in (*COMPONENTS, *OTHER_COMPONENTS) if name in parts]
    assert sum(parts[name] for name in tensors) == memory.peak_allocated_bytes >= memory.peak_requested_bytes
    for name in tensors:
        assert sum(line.bytes for line in memory.lines if line.component == name) == parts[name]
    assert sum(share.activation_bytes for share in analysis.modules) == parts["activations"]
    if analysis.out_of_memory is None and memory.peak_reserved_bytes:
        assert memory.device_bytes <= gpu * MIB


@given(traces(), st.integers(1, 60))
def test_a_timeline_keeps_every_peak(trace: AllocationTrace, points: int) -> None:
    analysis = analyze_memory(trace, DEFAULT, GIB, 0)
    shown = memory_timeline(trace, analysis.purposes, analysis.sizes, points)
    assert len(shown) <= 2 * points + 1 + len(COMPONENTS) + len({origin.phase for origin in trace.origins})
    assert [point.event for point in shown] == sorted({point.event for point in shown})
    assert max((sum(p.components.values()) for p in shown), default=0) == analysis.memory.peak_allocated_bytes
    assert all(min(point.components.values()) >= 0 for point in shown)


def test_a_timeline_keeps_the_most_of_each_component() -> None:
    builder = TraceBuilder()
    builder.free(builder.allocate(8 * MIB, "optimizer"))
    builder.free(builder.allocate(2 * MIB, "forward", "gradient"), builder.allocate(4 * MIB, "backward"))
    builder.allocate(32 * MIB, "forward", "weight")
    analysis = analyze_memory(builder.trace, DEFAULT, GIB, 0)
    shown = memory_timeline(builder.trace, analysis.purposes, analysis.sizes, 1)
    assert [point.components["temporary"] // MIB for point in shown] == [8, 0, 4, 0]
    assert [point.components["gradients"] // MIB for point in shown] == [0, 2, 2, 0]


@pytest.mark.parametrize("event", range(18))
def test_timeline_points_have_step_and_phase(event: int) -> None:
    trace, _ = one_step()
    analysis = analyze_memory(trace, DEFAULT, GIB, 0)
    shown = memory_timeline(trace, analysis.purposes, analysis.sizes, 10_000)
    assert len(shown) == len(trace.events)
    newest = max((e.allocation for e in trace.events[: event + 1] if e.action == "alloc"), default=0)
    if event < len(shown):
        assert (shown[event].event, shown[event].phase) == (event, trace.origins[newest].phase)


def test_operations_are_analyzed_on_the_same_gpu_as_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave both the same memory after the context, so that both find the same peak on an almost full GPU."""
    contexts = []

    def spy(
        trace: AllocationTrace,
        settings: AllocatorSettings,
        gpu_bytes: int,
        context: int,
        nccl: int,
        *more: Any,
        **how: Any,
    ) -> MemoryAnalysis:
        contexts.append(context + nccl)
        return analyze_memory(trace, settings, gpu_bytes, context, nccl, *more, **how)

    monkeypatch.setattr(trainatomy.prediction.assemble, "analyze_memory", spy)
    workload = trainatomy.Workload.from_mapping({"model": TINY_BERT, "gpu": "t4"})
    predicted = trainatomy.predict(workload, timed=False)
    trainatomy.ops(workload)
    assert contexts == [predicted.memory.components.context] * 2
    assert contexts[0] > 100 * MIB
