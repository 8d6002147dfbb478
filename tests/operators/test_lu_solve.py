"""What solving with LU factors allocates, as a training on an H200 shows it (slogdet of 300 x 300, torch 2.11)."""

from __future__ import annotations

import pytest
import torch

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.process import SimulatedProcess

MATRIX, ROW = 300 * 300 * 4, 300 * 8


@pytest.fixture
def process() -> SimulatedProcess:
    return SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, (2, 11)), allocation_rules())


def allocated(
    process: SimulatedProcess, rows: int, columns: int, *, batch: int = 1, adjoint: bool = False
) -> list[int]:
    """Return the bytes of each allocation of a solution, in order."""
    with process.open():
        factors = torch.empty(batch, rows, rows, device="cuda").mT
        pivots = torch.empty(batch, rows, device="cuda", dtype=torch.int32)
        right = torch.empty(batch, rows, columns, device="cuda")
        before = len(process.trace.events)
        torch.linalg.lu_solve(factors, pivots, right, adjoint=adjoint)
        return [event.bytes for event in process.trace.events[before:] if event.action == "alloc"]


def test_the_rows_of_a_matrix_are_permuted_into_a_copy(process: SimulatedProcess) -> None:
    found = allocated(process, 300, 300)
    assert [each for each in found if each in (MATRIX, ROW)] == [MATRIX, ROW, ROW, ROW, MATRIX]


def test_the_transposed_matrix_needs_no_inverse(process: SimulatedProcess) -> None:
    found = allocated(process, 300, 300, adjoint=True)
    assert [each for each in found if each in (MATRIX, ROW)] == [MATRIX, ROW, MATRIX]


def test_a_batch_has_a_permutation_of_each(process: SimulatedProcess) -> None:
    found = allocated(process, 300, 300, batch=3)
    wanted = [3 * MATRIX, ROW, 3 * ROW, ROW, 3 * ROW, 3 * MATRIX]
    assert [each for each in found if each in wanted] == wanted


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (8, 200), (64, 50), (100, 2)])
def test_small_systems_are_solved_at_once(process: SimulatedProcess, rows: int, columns: int) -> None:
    assert allocated(process, rows, columns) == [rows * columns * 4]
