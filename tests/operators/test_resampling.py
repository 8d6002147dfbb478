"""Memory of interpolations besides their results, as a training on an H200 shows it (torch 2.11)."""

from __future__ import annotations

import torch
from torch.nn import functional

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.process import SimulatedProcess


def allocated_in_backward(*, strided: bool) -> list[int]:
    """Return the bytes of each allocation of the gradient of an interpolation from 75 to 120 places, in order."""
    process = SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, (2, 11)), allocation_rules())
    with process.open():
        data = torch.empty(24, 192, 75, device="cuda", requires_grad=True)
        output = functional.interpolate(data, size=120, mode="linear")
        gradient = torch.empty(120, 24, 192, device="cuda").permute(1, 2, 0) if strided else torch.empty_like(output)
        before = len(process.trace.events)
        output.backward(gradient)
        return [event.bytes for event in process.trace.events[before:] if event.action == "alloc"]


def test_a_strided_gradient_is_made_contiguous() -> None:
    assert allocated_in_backward(strided=True) == [1_382_400, 2_211_840]
    assert allocated_in_backward(strided=False) == [1_382_400]
