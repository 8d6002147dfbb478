"""Calls of NumPy and seeds inside of a step, which take the CPU's time without launching an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first imported

from trainatomy.catalog.machines import reference_host
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.launch import cpu_seconds_by_phase
from trainatomy.workload import Workload

BLOCKS = """
import numpy as np

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, labels=None):
        torch.manual_seed(5)
        order = np.random.permutation(np.arange(4, dtype=np.int64))
        largest = np.maximum.reduce(order)
        assert isinstance(order, np.ndarray) and np.pi > 3 and largest == 3
        return {"loss": self.linear(x)[:, torch.from_numpy(order)].sum()}

def model():
    return Blocks()

def batch(samples):
    return {"x": torch.randn(samples, 4)}
"""


def test_numpy_and_seeds_are_counted_by_phase_and_left_as_they_were(from_factory: Callable[..., Workload]) -> None:
    blocks = from_factory(BLOCKS, gpu="h100-sxm", train={"gradient_accumulation_steps": 2})
    seed, permutation = torch.manual_seed, numpy.random.permutation
    for _ in range(2):
        found = simulate(blocks, blocks.resolve_gpu()).operations
        assert found.python_calls == {"manual_seed.forward": 2, "numpy.forward": 4}  # permutation and arange, twice
    assert torch.manual_seed is seed and numpy.random.permutation is permutation


def test_what_is_counted_takes_the_cpus_time(of_phase: Callable[..., Any]) -> None:
    costs = cpu_costs(reference_host().microseconds)
    plain, called = of_phase({}), of_phase({"numpy.forward": 100, "manual_seed.forward": 2})
    more = (
        cpu_seconds_by_phase(called, costs, "pytorch")["forward"]
        - cpu_seconds_by_phase(plain, costs, "pytorch")["forward"]
    )
    assert (
        more == pytest.approx(100 * costs.python_call["numpy"] + 2 * costs.python_call["manual_seed"]) and more > 1e-4
    )


@pytest.fixture
def of_phase() -> Callable[..., Operations]:
    """Return a step of an addition in forward, with some calls."""
    array = Array((1024,), (1,), "float32", 4, 0)
    call = Call("aten::add", (array, array), (array,))

    def made(calls: dict[str, int]) -> Operations:
        return Operations(calls=[call], operations=[Operation(0, 0, "forward", "", 0, 1)], python_calls=calls)

    return made
