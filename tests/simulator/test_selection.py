"""Selections by masks that came with the batch, and backward formulas that fill fresh zeros in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import SimulationError
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload


def _allocated(process: SimulatedProcess, operation: str) -> list[int]:
    trace = process.trace
    return [e.bytes for e in trace.events if e.action == "alloc" and trace.origins[e.allocation].operation == operation]


def test_a_known_mask_selects_as_many_rows_as_it_has_ones(process: SimulatedProcess) -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]]).to("cuda")
    scores = torch.randn(2, 3, 5, device="cuda")
    assert scores[mask].shape == (3, 5)
    assert mask.nonzero().shape == (3, 2)
    assert torch.masked_select(scores[..., 0], mask).shape == (3,)
    scores[mask] = 0.0
    assert scores.shape == (2, 3, 5)


def test_a_mask_made_from_data_on_the_device_is_known(process: SimulatedProcess) -> None:
    mask = torch.tensor([True, False, True], device="cuda")
    assert torch.randn(3, 4, device="cuda")[mask].shape == (2, 4)


def test_a_known_mask_is_known_in_backward_too(process: SimulatedProcess) -> None:
    mask = torch.tensor([True, False, True, True]).to("cuda")
    scores = torch.randn(4, 8, device="cuda", requires_grad=True)
    scores[mask].sum().backward()
    assert scores.grad is not None
    assert scores.grad.shape == (4, 8)


def test_a_mask_of_computed_values_is_refused(process: SimulatedProcess) -> None:
    scores = torch.randn(4, 8, device="cuda")
    with pytest.raises(SimulationError, match=r"aten::index in the training loop"):
        scores[scores > 0]


def test_a_gradient_is_scattered_into_the_zeros_themselves(process: SimulatedProcess) -> None:
    table = torch.randn(100, 64, device="cuda", requires_grad=True)
    table.gather(1, torch.zeros(100, 4, dtype=torch.long, device="cuda")).sum().backward()
    assert _allocated(process, "aten::new_zeros") == [100 * 64 * 4]
    assert _allocated(process, "aten::scatter_add") == []


def test_rolling_two_dimensions_allocates_a_tensor_for_each(process: SimulatedProcess) -> None:
    torch.roll(torch.randn(2, 8, 8, device="cuda"), (1, 1), (1, 2))
    assert _allocated(process, "aten::roll") == [512]
    assert _allocated(process, "aten::roll (rolled 0)") == [512]


def test_numbers_are_repeated_as_often_as_known_values_say(process: SimulatedProcess) -> None:
    repeats = torch.tensor([2, 0, 3]).to("cuda")
    rows = torch.randn(3, 4, device="cuda")
    assert rows.repeat_interleave(repeats, dim=0).shape == (5, 4)
    assert torch.repeat_interleave(repeats).tolist() == [0, 0, 2, 2, 2]
    assert _allocated(process, "aten::repeat_interleave") == [40, 40]
    assert _allocated(process, "aten::repeat_interleave (ends)") == [24, 24]


def test_known_values_are_made_unique(process: SimulatedProcess) -> None:
    rows = torch.tensor([2, 0, 2, 2]).to("cuda")
    found, counts = torch.unique(rows, return_counts=True)
    assert found.shape == counts.shape == (2,) and counts.tolist() == [1, 3]
    assert torch.unique_consecutive(rows).tolist() == [2, 0, 2]
    assert torch.unique(rows[:, None], dim=0).shape == (2, 1)


def test_a_training_whose_loss_selects_by_values_says_what_is_assumed(from_factory: Callable[..., Workload]) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x, y):
        losses = nn.functional.cross_entropy(self.body(x), y, reduction="none")
        return losses[losses > 0.1].mean()

def model():
    return Net()

def batch(size):
    return {"x": torch.randn(size, 8), "y": torch.zeros(size, dtype=torch.uint8)}
"""
    found = simulate(from_factory(text), find_gpu("h200"))
    notes = [note for note in found.notes if note.startswith("what these operations select")]
    assert len(notes) == 1
    assert "aten::index in Net, " in notes[0] and "assumed to be everything" in notes[0]


def test_values_that_are_written_through_a_known_mask_are_known(process: SimulatedProcess) -> None:
    marked, mask = torch.zeros(4, dtype=torch.long).to("cuda"), torch.tensor([True, False, True, True]).to("cuda")
    marked[mask] = 1
    assert marked.nonzero().shape == (3, 1)
