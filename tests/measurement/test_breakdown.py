"""The measured memory breakdown: totals, live memory at a failure, and the merge of two runs."""

from __future__ import annotations

from dataclasses import replace

from measured import RESULT

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import Workspaces
from trainatomy.measurement.measure import merge_runs
from trainatomy.measurement.traces.breakdown import (
    UNEXPLAINED,
    AllocatorSetup,
    Failure,
    MeasuredBreakdown,
    MeasuredTotals,
    measured_breakdown,
)
from trainatomy.measurement.traces.history import AllocationHistory, HistoryEvent, Note
from trainatomy.results.memory import Instant

MIB = 2**20
SETUP = AllocatorSetup(AllocatorSettings(torch_version=(2, 11)), Workspaces(32 * MIB, MIB, False))
WEIGHT, GRADIENT, ACTIVATION, BATCH = 64 * MIB, 4096 * MIB, 8192 * MIB, 2048 * MIB


def history(*more: HistoryEvent) -> AllocationHistory:
    """Return a history: 10 MiB of weights, a batch, 40 MiB of activations in ``layer``, a gradient, ``more``."""
    events = [
        HistoryEvent("alloc", WEIGHT, 10 * MIB, 0),
        HistoryEvent("alloc", BATCH, 2 * MIB, 0),
        HistoryEvent("alloc", ACTIVATION, 40 * MIB, 0),
        HistoryEvent("alloc", GRADIENT, 10 * MIB, 0),
    ]
    notes = [
        Note(1, "loaded", -1, {"weight": [WEIGHT]}),
        Note(2, "step", 0, {}),
        Note(2, "forward", 0, {}),
        Note(2, "call", 0, {}, "layer"),
        Note(3, "return", 0, {}),
        Note(3, "forward end", 0, {}),
        Note(4, "backward end", 0, {}),
        Note(4, "optimizer", 0, {"gradient": [GRADIENT]}),
    ]
    return AllocationHistory({}, [*events, *more], notes)


def counted(allocated: int = 62 * MIB, reserved: int = 80 * MIB, device: int | None = 600 * MIB) -> MeasuredTotals:
    return MeasuredTotals(allocated, reserved, device, 10 * MIB, 0)


def breakdown(totals: MeasuredTotals) -> MeasuredBreakdown:
    return measured_breakdown(history(), SETUP, totals, (0,))


def test_every_byte_has_its_component_and_the_counters_give_the_totals() -> None:
    found = breakdown(counted())
    parts = found.memory.components
    assert (parts.weights, parts.gradients, parts.activations) == (10 * MIB, 10 * MIB, 40 * MIB)
    assert parts.functionality == 2 * MIB  # the batch
    assert (parts.cache, parts.context, parts.total_bytes) == (18 * MIB, 520 * MIB, 600 * MIB)
    assert [(share.module, share.activation_bytes) for share in found.modules] == [("layer", 40 * MIB)]
    assert (found.memory.peak.step, found.memory.peak.phase) == (0, "backward")


def test_unexplained_memory_is_a_line_with_a_note() -> None:
    found = breakdown(counted(allocated=63 * MIB))
    assert found.memory.components.total_bytes == 600 * MIB
    assert found.memory.lines[-1].name == UNEXPLAINED and found.memory.lines[-1].bytes == MIB
    assert any("peak allocated" in note for note in found.notes)
    exact = replace(counted(), peak_reserved_bytes=found.memory.peak_reserved_bytes)
    assert not any("peak allocated" in note for note in breakdown(exact).notes)


def test_without_driver_figures_there_is_a_note_but_no_context() -> None:
    found = breakdown(counted(device=None))
    assert found.memory.components.context == 0
    assert any("the breakdown has no CUDA context" in note for note in found.notes)


def test_unknown_modules_at_the_peak_are_not_listed() -> None:
    found = measured_breakdown(history(), SETUP, counted(), ())
    assert found.modules == ()
    assert "no modules" in found.notes[-1]


def test_out_of_memory_shows_the_live_memory_at_the_failure() -> None:
    freed = [HistoryEvent(kind, ACTIVATION, 40 * MIB, 0) for kind in ("free_requested", "free_completed")]
    failed = history(
        *freed, HistoryEvent("oom", 7, 100 * MIB, 0), HistoryEvent("free_completed", GRADIENT, 10 * MIB, 0)
    )
    failed = replace(failed, notes=[*failed.notes, Note(8, "failed", 0, {"gradient": [GRADIENT]})])
    failure = Failure(Instant(0, "backward", "", ""), 99 * MIB, 12 * MIB, 70 * MIB)
    found = measured_breakdown(failed, SETUP, counted(), (0,), failure)
    parts = found.memory.components
    assert (parts.weights, parts.gradients, parts.activations) == (10 * MIB, 10 * MIB, 0)
    assert (found.memory.peak_allocated_bytes, parts.cache, parts.context) == (22 * MIB, 48 * MIB, 520 * MIB)
    point = found.out_of_memory
    assert point is not None
    assert (point.requested_bytes, point.allocated_bytes, point.reserved_bytes) == (100 * MIB, 22 * MIB, 70 * MIB)


def test_out_of_memory_in_a_library_is_recognized_by_its_message() -> None:
    failed = replace(history(), notes=[*history().notes, Note(4, "failed", 0, {})])
    failure = Failure(Instant(0, "optimizer", "", ""), 99 * MIB, 62 * MIB, 70 * MIB)
    found = measured_breakdown(failed, SETUP, counted(), (0,), failure)
    assert found.out_of_memory is not None and found.out_of_memory.requested_bytes == 99 * MIB
    assert found.memory.components.activations == 40 * MIB


CONTROL = replace(
    RESULT, peak_allocated_bytes=62 * MIB, peak_reserved_bytes=80 * MIB, device_bytes=600 * MIB, step_seconds=0.2
)


def test_two_runs_are_one_measurement_with_the_totals_of_the_control_run() -> None:
    recorded = replace(
        CONTROL, memory=breakdown(counted()).memory, device_bytes=602 * MIB, step_seconds=0.21, notes=("a",)
    )
    found = merge_runs(replace(CONTROL, notes=("a",)), recorded)
    assert (found.step_seconds, found.recorded_step_seconds, found.device_bytes) == (0.2, 0.21, 600 * MIB)
    assert found.memory is not None and found.memory.components.total_bytes == 600 * MIB
    assert found.notes[0] == "a" and "peak device memory was" in found.notes[1] and len(found.notes) == 2


def test_runs_that_end_differently_have_no_common_breakdown() -> None:
    recorded = replace(CONTROL, memory=breakdown(counted()).memory, status="out of memory")
    found = merge_runs(CONTROL, recorded)
    assert (found.status, found.memory) == ("completed", None)
    assert "memory is barely sufficient" in found.notes[-1]
