"""Operators whose CUDA kernels call other operators, and those that write to ``out``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.run_notes import run_notes

ROWS, COLUMNS = 100, 1000
LARGE = 4 * ROWS * COLUMNS


def sizes(process: SimulatedProcess, run: Callable[[], object]) -> list[int]:
    """Return the bytes of the allocations of a function, as they come."""
    first = len(process.recorder.trace.events)
    kept = run()
    del kept
    return [event.bytes for event in process.recorder.trace.events[first:] if event.action == "alloc"]


def test_logsumexp_subtracts_the_maxima_in_a_copy(process: SimulatedProcess) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda", requires_grad=True)
    # The maxima (and result), their absolute values, whether these are infinite, and the differences.
    assert sizes(process, lambda: x.logsumexp(1)).count(LARGE) == 1


def test_distances_are_a_product_of_rows_with_their_norms(process: SimulatedProcess) -> None:
    x, y = torch.randn(ROWS, COLUMNS, device="cuda", requires_grad=True), torch.randn(30, COLUMNS, device="cuda")
    found = sizes(process, lambda: torch.cdist(x, y))
    assert [size for size in found if size > 4000 * 20] == [
        LARGE,  # x²
        30 * COLUMNS * 4,  # y²
        LARGE,  # −2x
        ROWS * (COLUMNS + 2) * 4,
        30 * (COLUMNS + 2) * 4,
    ]
    assert found[-1] == ROWS * 30 * 4


def test_gradients_of_distances_have_a_part_for_each_pair(process: SimulatedProcess) -> None:
    x = torch.randn(20, 64, device="cuda", requires_grad=True)
    assert 19 * 20 * 64 * 4 in sizes(process, lambda: torch.pdist(x).sum().backward())
    y = torch.randn(2, 9, 64, device="cuda")
    assert 2 * 9 * 20 * 64 * 4 in sizes(process, lambda: torch.cdist(x.expand(2, 20, 64), y, p=1).sum().backward())


def test_a_bilinear_layer_multiplies_output_by_output(process: SimulatedProcess) -> None:
    layer = torch.nn.Bilinear(30, 20, 3).cuda()
    x, y = torch.randn(10, 30, device="cuda"), torch.randn(10, 20, device="cuda")
    products = [10 * 20 * 4, 10 * 4]
    assert sizes(process, lambda: layer(x, y)) == [120, *products * 3, 120]


def test_mish_has_one_kernel_for_its_gradient(process: SimulatedProcess) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda", requires_grad=True)
    assert sizes(process, lambda: functional.mish(x).sum().backward()).count(LARGE) == 2


@pytest.mark.parametrize("resize", [False, True])
def test_an_empty_tensor_gets_memory_when_it_is_written_to(process: SimulatedProcess, resize: bool) -> None:
    x, out = torch.randn(COLUMNS, device="cuda"), torch.empty(0, device="cuda")
    events, first = process.recorder.trace.events, len(process.recorder.trace.events)
    if resize:
        out.resize_(COLUMNS)
    torch.add(x, x, out=out)
    torch.add(x, 1, out=out)
    assert [(event.action, event.bytes) for event in events[first:]] == [("alloc", 4 * COLUMNS)]
    out.resize_(2 * COLUMNS)
    assert [event.action for event in events[first:]] == ["alloc", "alloc", "free"]
    assert events[-1].allocation == events[first].allocation


def test_a_sparse_gradient_holds_the_rows_that_occur(process: SimulatedProcess) -> None:
    table = torch.nn.Embedding(1000, 64, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    ids = [torch.tensor([7, 8, 9]).cuda(), torch.tensor([[9, 1], [9, 1]]).cuda()]
    row = 64 * 4
    for _ in range(2):
        loss = sum(table(each).square().sum() for each in ids)
        joined = sizes(process, loss.backward)[-2:]
        assert joined == [7 * 8, 7 * row]  # seven indices, seven rows
        assert table.weight.grad is not None and table.weight.grad._nnz() == 7
        found = [size for size in sizes(process, optimizer.step) if size < 1000 * row]
        # A copy of the indices, their order, offsets, the sort's memory; four different rows.
        assert found[:5] == [7 * 8, 7 * 8, 7 * 8, 2 * 7 * 8 + 8, 4 * row]
        assert found[5:].count(4 * row) == 7  # of both states: rows, their product with ones, new ones; and the step
        optimizer.zero_grad()


def test_sparse_gradients_accumulate_and_update_weights(process: SimulatedProcess) -> None:
    table = torch.nn.Embedding(1000, 64, sparse=True).cuda()
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    for rows in (4, 8):
        table(torch.tensor([1, 2, 3, 1]).cuda()).square().sum().backward()
        assert table.weight.grad is not None and table.weight.grad._nnz() == rows
    assert sizes(process, optimizer.step) == []


def test_additions_of_a_gradient_s_own_formula_make_new_tensors(process: SimulatedProcess) -> None:
    x = torch.randn(ROWS, ROWS, device="cuda", requires_grad=True)
    square = 4 * ROWS * ROWS
    loss = torch.linalg.cholesky(x).sum()
    # The product, its operand in another layout, two triangles, their sum, its half, two solutions, the gradient.
    assert sizes(process, loss.backward).count(square) == 9
    loss = (x * x).sum() + x.sin().sum()  # both gradients of x * x are the engine's to add, in place
    gradients = sizes(process, loss.backward)
    assert gradients.count(square) == 4  # two factors of x * x, and the cosine with its product


def test_gradients_of_products_divide_by_the_factors(process: SimulatedProcess) -> None:
    x = torch.rand(ROWS, COLUMNS, device="cuda", requires_grad=True)
    assert sizes(process, x.prod(1).sum().backward).count(LARGE) == 2  # result / x, and its product with the gradient
    assert sizes(process, x.cumprod(1).sum().backward).count(LARGE) == 5  # as before, turned, summed, turned, divided


def test_memory_without_a_rule_is_named(process: SimulatedProcess) -> None:
    torch.randn(4, 4, device="cuda").cos()
    assert list(run_notes(process.recorder)) == []
    torch.linalg.matrix_exp(torch.randn(4, 4, device="cuda"))
    assert ["aten::linalg_matrix_exp" in note for note in run_notes(process.recorder)] == [True]
