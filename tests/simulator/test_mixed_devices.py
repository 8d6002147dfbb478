"""Tensors of the host and of the GPU in one operation: what PyTorch allows, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainatomy.catalog.gpus import find_gpu
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

MASK, FIRST = [True, False, True, False], [0]


def scalar() -> torch.Tensor:
    return torch.randn(8, device="cuda").mean()


def vector(size: int = 4) -> torch.Tensor:
    return torch.randn(size, device="cuda")


def host() -> torch.Tensor:
    return torch.ones(4)


def at(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda: at(host(), 1, scalar()), [1, 0, 1, 1]),
        (lambda: at(host(), slice(1, 3), vector(2)), [1, 0, 0, 1]),
        (lambda: at(host(), torch.tensor(MASK), scalar()), [0, 1, 0, 1]),
        (lambda: at(host(), FIRST, scalar()), [0, 1, 1, 1]),
        (lambda: host().copy_(vector()), [0, 0, 0, 0]),
        (lambda: host().double().copy_(scalar()), [0, 0, 0, 0]),
        (lambda: host().pin_memory().copy_(vector(), non_blocking=True), [0, 0, 0, 0]),
        (lambda: host().fill_(scalar()), [0, 0, 0, 0]),
        (lambda: host().masked_fill_(torch.tensor(MASK), scalar()), [0, 1, 0, 1]),
        (lambda: host().masked_fill(torch.tensor(MASK), scalar()), [0, 1, 0, 1]),
        (lambda: host().index_fill_(0, torch.tensor(FIRST), scalar()), [0, 1, 1, 1]),
        (lambda: host().index_put_((torch.tensor(FIRST),), scalar()), [0, 1, 1, 1]),
        (lambda: host().index_put((torch.tensor(FIRST),), scalar()), [0, 1, 1, 1]),
        (lambda: torch._foreach_copy_([host(), host()], [vector(), vector()])[1], [0, 0, 0, 0]),
        (lambda: host().long().copy_(vector().argsort()), [0, 0, 0, 0]),
        (lambda: host().long().copy_(torch.arange(4, device="cuda")), [0, 1, 2, 3]),
        (lambda: at(host().long(), 1, torch.tensor(3).cuda()), [1, 3, 1, 1]),
        (lambda: host().bool().copy_(vector() > 0), [True] * 4),
        (lambda: host().bool().copy_(torch.isnan(vector())), [False] * 4),
    ],
)
def test_a_tensor_of_the_host_takes_what_python_would_read(
    process: SimulatedProcess, write: Callable[[], torch.Tensor], expected: list[float]
) -> None:
    written = write()
    assert written.device.type == "cpu" and written.tolist() == expected


@pytest.mark.parametrize(
    "compute",
    [
        lambda: host().add_(scalar()),
        lambda: host() + scalar(),
        lambda: host().mul_(vector()),
        lambda: host().lerp_(vector(), 0.5),
        lambda: vector().add_(host()),
        lambda: at(host(), torch.tensor(MASK), vector(2)),
        lambda: at(host(), torch.tensor(MASK).cuda(), 1.0),
        lambda: at(vector(), torch.tensor(MASK).cuda(), torch.ones(2)),
        lambda: host()[torch.tensor(FIRST).cuda()],
        lambda: host().scatter_(0, torch.tensor(FIRST), vector(1)),
        lambda: host().index_copy_(0, torch.tensor(FIRST), vector(1)),
        lambda: torch.stack([vector(), vector()], out=torch.empty(2, 4)),
        lambda: torch.cat([host(), vector()]),
        lambda: torch.where(torch.tensor(MASK), vector(), vector()),
        lambda: torch.mm(torch.ones(2, 2), vector().view(2, 2)),
        lambda: torch.nn.functional.linear(host(), torch.randn(3, 4, device="cuda")),
        lambda: torch.nn.functional.embedding(torch.tensor(FIRST), torch.randn(3, 4, device="cuda")),
    ],
)
def test_what_pytorch_refuses_is_refused(process: SimulatedProcess, compute: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        compute()


@pytest.mark.parametrize(
    "compute",
    [
        lambda: vector() + torch.tensor(1.0),
        lambda: vector().add_(torch.tensor(1.0)),
        lambda: torch.where(vector() > 0, torch.tensor(1.0), vector()),
        lambda: at(vector(), 1, torch.tensor(2.0)),
        lambda: at(vector(), slice(1, 3), torch.ones(2)),
        lambda: at(vector(), torch.tensor(MASK).cuda(), torch.tensor(2.0)),
        lambda: vector()[torch.tensor(FIRST)],
        lambda: torch._foreach_addcdiv([vector()], [vector()], [vector()], torch.ones(1))[0],
    ],
)
def test_numbers_and_indices_of_the_host_serve_the_gpu(
    process: SimulatedProcess, compute: Callable[[], torch.Tensor]
) -> None:
    assert compute().is_cuda


def test_a_loss_that_is_kept_on_the_host_is_noted(from_factory: Callable[..., Workload]) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)

    def forward(self, x):
        loss = self.body(x).square().mean()
        with torch.no_grad():
            WRITE
        return loss

def model():
    return Net()

def batch(size):
    return {"x": torch.randn(size, 8)}
"""
    writes = "kept = torch.tensor([1.0, 2.0]); kept[1] = loss; assert kept.tolist() == [1, 0]"
    notes = [simulate(from_factory(text.replace("WRITE", code)), find_gpu("h200")).notes for code in (writes, "pass")]
    assert [any("written to tensors in host memory (aten::copy_)" in note for note in each) for each in notes] == [
        True,
        False,
    ]
