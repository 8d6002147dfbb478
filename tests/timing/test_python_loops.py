"""Loops written in Python: which operations belong to one, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainatomy.catalog.machines import reference_host
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.timing.host_costs import LEAST_TURNS, LONGEST_TURN, cpu_costs, in_python_loops
from trainatomy.timing.launch import launch_seconds

ROW, MATRIX = (Array((size,), (1,), "float32", 4, 0) for size in (64, 4096))
CALLS = [
    Call("aten::select", (MATRIX,), (ROW,), is_view=True),
    Call("aten::mul", (ROW, ROW), (ROW,)),
    Call("aten::copy_", (ROW, ROW), (ROW,)),
    Call("aten::mul", (MATRIX, MATRIX), (MATRIX,)),
]


def _launched(calls: list[int], phase: str = "forward", modules: list[str] | None = None) -> Operations:
    paths = modules or [""] * len(calls)
    launched = [Operation(place, call, phase, paths[place], 0, 1) for place, call in enumerate(calls)]
    return Operations(calls=CALLS, operations=launched)


@pytest.mark.parametrize(("turns", "looped"), [(LEAST_TURNS - 1, False), (LEAST_TURNS, True)])
def test_equal_turns_in_a_row_are_a_loop(turns: int, looped: bool) -> None:
    found = in_python_loops(_launched([3, *([0, 1, 2] * turns), 3]))
    assert found == [False, *([looped] * 3 * turns), False]


def test_turns_of_which_one_has_other_shapes_are_no_loop() -> None:
    assert not any(in_python_loops(_launched([*([0, 1, 2] * (LEAST_TURNS - 1)), 0, 3, 2])))


def test_layers_of_a_model_are_no_loop() -> None:
    modules = [f"layers.{layer}" for layer in range(LEAST_TURNS) for _ in range(3)]
    assert not any(in_python_loops(_launched([0, 1, 2] * LEAST_TURNS, modules=modules)))


@pytest.mark.parametrize(("operations", "looped"), [(LONGEST_TURN, True), (LONGEST_TURN + 1, False)])
def test_long_turns_are_no_loop(operations: int, looped: bool) -> None:
    rows = [Array((size,), (1,), "float32", 4, 0) for size in range(1, operations + 1)]
    calls = [Call("aten::mul", (row, row), (row,)) for row in rows]
    launched = [Operation(place, place % operations, "forward", "", 0, 1) for place in range(operations * LEAST_TURNS)]
    assert in_python_loops(Operations(calls=calls, operations=launched)) == [looped] * len(launched)


def test_a_backward_pass_has_no_loops() -> None:
    assert not any(in_python_loops(_launched([0, 1, 2] * LEAST_TURNS, phase="backward")))


def test_views_and_copies_of_a_loop_cost_less() -> None:
    costs = replace(cpu_costs(reference_host().microseconds), forward_pass=0.0)
    looped = list(launch_seconds(_launched([0, 1, 2] * LEAST_TURNS), costs, "trainer"))[:3]
    alone = list(launch_seconds(_launched([0, 1, 2]), costs, "trainer"))
    # without a backward pass, operations are launched as in inference
    assert looped == alone
    operations = _launched([0, 1, 2] * LEAST_TURNS)
    operations.operations.append(Operation(99, 1, "backward", "", 0, 1))
    first = list(launch_seconds(operations, costs, "trainer"))[:3]
    view, pointwise, copy = (costs.graph[kind] for kind in ("view", "pointwise", "copy"))
    assert first == pytest.approx([view * costs.looped["view"], pointwise, copy * costs.looped["copy"]])
