"""Differences between two allocation traces, by size."""

from __future__ import annotations

from compare_traces import SizeDifference, alive_at_peak, compare_peak, compare_step

from trainatomy.results.trace import AllocationTrace, Event, Origin


def trace(*sizes: int, step: int = 0, freed: tuple[int, ...] = (), operation: str = "op") -> AllocationTrace:
    """Return allocations of these sizes in one step; those at the indices ``freed`` are freed at once."""
    made = AllocationTrace()
    for index, size in enumerate(sizes):
        made.events.append(Event("alloc", index, size))
        made.origins.append(Origin(operation, "layer", "forward", step))
        if index in freed:
            made.events.append(Event("free", index, 0))
    return made


def test_a_missing_temporary_is_found_with_its_origin() -> None:
    found = compare_step(trace(512, 1000), trace(512, 1000, 4096, 4096, operation="gemm"), step=0)
    assert found == [SizeDifference(4096, 0, 2, (), ("2 x gemm in layer",))]
    assert found[0].excess_bytes == -8192


def test_differences_come_largest_first_and_rounded() -> None:
    found = compare_step(trace(1, 1, 700), trace(), step=0)
    assert [(difference.bytes, difference.excess_bytes) for difference in found] == [(1, 1024), (700, 1024)]
    assert compare_step(trace(9000, 1), trace(), step=0)[0].bytes == 9000


def test_other_steps_count_only_on_request() -> None:
    assert compare_step(trace(512, step=1), trace(), step=0) == []
    assert len(compare_step(trace(512, step=1), trace())) == 1


def test_the_peak_is_the_first_maximum_of_live_memory() -> None:
    made = trace(1024, 4096, 2048, freed=(1,))
    assert alive_at_peak(made) == [0, 1]
    assert compare_peak(made, trace(1024, 4096, 2048, 512, freed=(1,))) == []
