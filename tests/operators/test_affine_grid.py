"""What an affine grid allocates, as a trace of an H200 shows it (48 images of 96 x 80 pixels, torch 2.11)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.process import SimulatedProcess

BASE, GRID = 48 * 96 * 80 * 3 * 4, 48 * 96 * 80 * 2 * 4


@pytest.mark.parametrize(
    ("is_aligned", "sizes"),
    [(False, [BASE, 320, 320, 320, 384, 384, 384, GRID]), (True, [BASE, 320, 384, GRID])],
)
def test_an_affine_grid_makes_its_coordinates(is_aligned: bool, sizes: list[int]) -> None:
    process = SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, (2, 11)), allocation_rules())
    with process.open():
        theta = torch.zeros(48, 2, 3, device="cuda")
        before = len(process.trace.events)
        grid = functional.affine_grid(theta, [48, 3, 96, 80], align_corners=is_aligned)
        events = process.trace.events[before:]
    assert grid.shape == (48, 96, 80, 2)
    assert [event.bytes for event in events if event.action == "alloc"] == sizes
    assert sum(event.action == "free" for event in events) == len(sizes) - 1
