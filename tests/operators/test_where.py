"""What ``where`` allocates besides its result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.process import SimulatedProcess

SIZE = 20 * 32 * 32
"""Values of the quantile loss of a training on an H200, whose peak is a ``where`` (torch 2.11)."""


@pytest.mark.parametrize(
    ("choose", "sizes"),
    [
        (lambda mask, x: torch.where(mask, x, x.half()), [SIZE * 4, SIZE * 4]),
        (lambda mask, x: torch.where(mask, x.half(), x), [SIZE * 4, SIZE * 4]),
        (lambda mask, x: torch.where(mask, x, x), [SIZE * 4]),
        (lambda mask, x: torch.where(mask, x, torch.zeros((), device="cpu")), [4, SIZE * 4]),
    ],
)
def test_values_of_another_type_are_cast(choose: Callable[[Tensor, Tensor], Tensor], sizes: list[int]) -> None:
    process = SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, (2, 11)), allocation_rules())
    with process.open():
        mask, x = (torch.empty(20, 32, 32, device="cuda", dtype=dtype) for dtype in (torch.bool, torch.float32))
        before = len(process.trace.events)
        result = choose(mask, x)
        events, origins = process.trace.events[before:], process.trace.origins
        allocated = [one for one in events if one.action == "alloc"]
        found = [one.bytes for one in allocated if origins[one.allocation].operation.startswith("aten::where")]
    assert result.dtype is torch.float32
    assert found == sizes
