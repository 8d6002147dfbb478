"""The order of a real step, from one micro-batch that stands for others."""

from __future__ import annotations

from trainatomy.results.operations import Operation, Operations


def unrolled(*repeats: int) -> list[int]:
    return Operations([], [Operation(0, 0, "forward", "", 0, count) for count in repeats]).unrolled()


def test_a_micro_batch_is_repeated_as_a_whole() -> None:
    assert unrolled(1, 1, 3, 3, 1) == [0, 1, 2, 3, 2, 3, 2, 3, 4]


def test_what_runs_once_runs_once_and_nothing_is_nothing() -> None:
    assert unrolled(1, 1) == [0, 1]
    assert unrolled() == []
    assert unrolled(2, 3) == [0, 0, 1, 1, 1]
