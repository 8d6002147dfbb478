"""The bill of a tape: exact whatever the tape, and honest about what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from handmade import GIB, KIB, MIB, Hand, one_step
from hypothesis import given
from hypothesis import strategies as st

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import COMPONENTS, TIGHT_SHARE, analyze_memory, verdict
from trainatomy.analysis.memory_timeline import memory_timeline
from trainatomy.analysis.purposes import LABELLED
from trainatomy.results.memory import Instant
from trainatomy.results.trace import AllocationTrace

DEFAULT = AllocatorSettings()
CONTEXT = 500 * MIB
PHASES = ["load", "forward", "recompute", "backward", "optimizer", "other"]
MARKS = ["loaded", "forward end", "recompute end"]


def test_the_bill_of_one_step() -> None:
    trace, _ = one_step()
    settled = analyze_memory(trace, DEFAULT, 10 * GIB, CONTEXT)
    memory = settled.memory
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
    assert settled.out_of_memory is None
    assert verdict(memory, 10 * GIB, None) == "fits"


def test_blocks_are_counted_not_requests() -> None:
    hand = Hand()
    hand.take(1, "load", "weight")
    memory = analyze_memory(hand.trace, DEFAULT, GIB, 0).memory
    assert (memory.peak_requested_bytes, memory.components.weights, memory.components.cache) == (1, 512, 2 * MIB - 512)


def test_an_empty_tape_is_a_context_alone() -> None:
    settled = analyze_memory(AllocationTrace(), DEFAULT, GIB, CONTEXT)
    assert settled.memory.device_bytes == settled.memory.components.context == CONTEXT
    assert settled.memory.peak.step == -1
    assert settled.memory.lines == settled.modules == ()


def too_much() -> AllocationTrace:
    hand = Hand()
    hand.take(400 * MIB, "load", "weight")
    hand.mark("loaded")
    hand.take(200 * MIB, "forward", module="encoder", step=1)
    hand.take(600 * MIB, "backward", module="head", step=1)
    return hand.trace


def test_what_does_not_fit_names_the_place_and_is_shown_whole() -> None:
    settled = analyze_memory(too_much(), DEFAULT, GIB, 100 * MIB)
    point = settled.out_of_memory
    assert point is not None
    assert point.instant == Instant(1, "backward", "head", "aten::empty")
    assert (point.requested_bytes, point.allocated_bytes, point.reserved_bytes) == (600 * MIB, 600 * MIB, 600 * MIB)
    assert settled.memory.peak_allocated_bytes == 1200 * MIB
    assert settled.memory.components.total_bytes == 1300 * MIB
    assert verdict(settled.memory, GIB, point) == "does not fit"


def test_the_context_takes_its_part_of_the_card() -> None:
    assert analyze_memory(too_much(), DEFAULT, 1300 * MIB, 100 * MIB).out_of_memory is None
    assert analyze_memory(too_much(), DEFAULT, 1300 * MIB, 102 * MIB).out_of_memory is not None


def test_a_context_larger_than_the_card_fits_nothing() -> None:
    point = analyze_memory(too_much(), DEFAULT, 90 * MIB, 100 * MIB).out_of_memory
    assert point is not None
    assert (point.instant.phase, point.allocated_bytes) == ("load", 0)


def test_a_training_that_lives_by_retries_is_tight() -> None:
    hand = Hand()
    hand.give(hand.take(400 * MIB))
    hand.take(500 * MIB)
    roomy, scarce = (analyze_memory(hand.trace, DEFAULT, gpu, 0) for gpu in (GIB, 600 * MIB))
    assert verdict(roomy.memory, GIB, None) == "fits"
    assert (scarce.out_of_memory, scarce.memory.num_alloc_retries) == (None, 1)
    assert scarce.memory.peak_reserved_bytes == 500 * MIB  # the first segment went back to the driver
    assert verdict(scarce.memory, 600 * MIB, None) == "tight"


def test_a_training_may_fit_since_a_library_does_without_a_workspace() -> None:
    hand = Hand()
    hand.take(300 * MIB, "load", "weight")
    for step in range(2):
        workspace = hand.take(200 * MIB, "backward", step=step)
        hand.trace.choices[workspace] = 0
        hand.give(workspace)
    settled = analyze_memory(hand.trace, DEFAULT, 400 * MIB, 0)
    assert (settled.out_of_memory, settled.skipped_workspaces) == (None, (2,))  # of the last step
    assert settled.memory.peak_allocated_bytes == settled.memory.peak_requested_bytes == 300 * MIB
    assert verdict(settled.memory, 400 * MIB, None) == "tight"
    assert analyze_memory(hand.trace, DEFAULT, 500 * MIB, 0).skipped_workspaces == ()


def test_tight_begins_at_a_share_of_the_card() -> None:
    memory = analyze_memory(one_step()[0], DEFAULT, GIB, 0).memory
    gpu = 100 * GIB
    room = int(TIGHT_SHARE * gpu)
    assert verdict(replace(memory, device_bytes=gpu - room), gpu, None) == "fits"
    assert verdict(replace(memory, device_bytes=gpu - room + 1), gpu, None) == "tight"


@st.composite
def traces(draw: Any) -> AllocationTrace:
    """Any order of requests, releases and marks, with any labels."""
    hand, held = Hand(), []
    sizes = st.integers(0, 4 * KIB) | st.integers(0, 30 * MIB)
    labels = st.none() | st.sampled_from([*LABELLED, "a workspace"])
    for action in draw(st.lists(st.sampled_from("tttggme"), max_size=50)):
        if action == "t":
            phase = draw(st.sampled_from(PHASES))
            held.append(hand.take(draw(sizes), phase, draw(labels), draw(st.sampled_from(["", "h.0", "h.1.mlp"]))))
        elif action == "g" and held:
            hand.give(held.pop(draw(st.integers(0, len(held) - 1))))
        elif action == "m":
            hand.mark(draw(st.sampled_from(MARKS)))
        elif action == "e":
            hand.empty_cache()
    return hand.trace


@given(traces(), st.sampled_from(["", "expandable_segments:True", "roundup_power2_divisions:4"]), st.integers(1, 400))
def test_components_add_up_to_the_byte(trace: AllocationTrace, conf: str, gpu: int) -> None:
    """Whatever the tape, and whether or not it fits (a card of 1 to 400 MiB, a context of 20 MiB)."""
    settled = analyze_memory(trace, AllocatorSettings.parse(conf, (2, 11)), gpu * MIB, 20 * MIB)
    memory = settled.memory
    parts = memory.components.as_dict()
    assert sum(parts.values()) == memory.components.total_bytes == memory.device_bytes
    assert memory.device_bytes == memory.peak_reserved_bytes + 20 * MIB
    assert min(parts.values()) >= 0
    assert sum(parts[name] for name in COMPONENTS) == memory.peak_allocated_bytes >= memory.peak_requested_bytes
    for name in COMPONENTS:
        assert sum(line.bytes for line in memory.lines if line.component == name) == parts[name]
    assert sum(share.activation_bytes for share in settled.modules) == parts["activations"]
    if settled.out_of_memory is None and memory.peak_reserved_bytes:
        assert memory.device_bytes <= gpu * MIB


@given(traces(), st.integers(1, 60))
def test_no_peak_is_lost_in_a_timeline(trace: AllocationTrace, points: int) -> None:
    settled = analyze_memory(trace, DEFAULT, GIB, 0)
    shown = memory_timeline(trace, settled.purposes, settled.sizes, points)
    assert len(shown) <= 2 * points + 1
    assert [point.event for point in shown] == sorted({point.event for point in shown})
    assert max((sum(p.components.values()) for p in shown), default=0) == settled.memory.peak_allocated_bytes
    assert all(min(point.components.values()) >= 0 for point in shown)


@pytest.mark.parametrize("event", range(18))
def test_points_tell_step_and_phase(event: int) -> None:
    trace, _ = one_step()
    settled = analyze_memory(trace, DEFAULT, GIB, 0)
    shown = memory_timeline(trace, settled.purposes, settled.sizes, 10_000)
    assert len(shown) == len(trace.events)
    newest = max((e.allocation for e in trace.events[: event + 1] if e.action == "alloc"), default=0)
    if event < len(shown):
        assert (shown[event].event, shown[event].phase) == (event, trace.origins[newest].phase)
