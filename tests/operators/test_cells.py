"""Recurrent cells, which CUDA runs with fused kernels."""

from __future__ import annotations

import pytest
import torch

from trainatomy import dry_run

ROWS, WIDTH = 64, 512


@pytest.mark.parametrize(("kind", "numbers"), [("GRUCell", 3 + 3 + 5 + 1 + 1), ("LSTMCell", 4 + 4 + 4 + 2 + 1)])
def test_a_cell_keeps_its_gates_and_the_workspace(kind: str, numbers: int) -> None:
    """Of each time step are kept both products, the workspace, the states and the input."""
    with dry_run(gpu="h200"):
        cell = getattr(torch.nn, kind)(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.SGD(cell.parameters(), 0.1)
        state = torch.zeros(ROWS, WIDTH, device="cuda")
        states = state if kind == "GRUCell" else (state, state.clone())
        with torch.no_grad():
            cell(state, states)  # the workspaces of cuBLAS
        before = torch.cuda.memory_allocated()
        for _ in range(8):
            states = cell(torch.ones(ROWS, WIDTH, device="cuda"), states)
        kept = torch.cuda.memory_allocated() - before
        for _ in range(4):
            (cell(state, state) if kind == "GRUCell" else cell(state)[0]).sum().backward()
            assert cell.weight_hh.grad.shape == cell.weight_hh.shape
            optimizer.step()
            optimizer.zero_grad()
    assert kept == 8 * numbers * ROWS * WIDTH * 4
