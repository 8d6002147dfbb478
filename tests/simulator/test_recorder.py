"""Allocation trace of a step: gradients added in place, modules by name, recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainatomy.simulator.process import SimulatedProcess

KIB = 1024


def placed(process: SimulatedProcess, model: nn.Module) -> nn.Module:
    process.adopt(model)
    return model.to("cuda")


def net() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 64))


def peak(process: SimulatedProcess, start: int) -> int:
    """Return the peak of the bytes allocated since event ``start``."""
    sizes: dict[int, int] = {}
    now = most = 0
    for event in process.trace.events[start:]:
        if event.action == "alloc":
            sizes[event.allocation] = event.bytes
            now += event.bytes
        else:
            now -= sizes.pop(event.allocation, 0)
        most = max(most, now)
    return most


def additions(process: SimulatedProcess, start: int) -> int:
    origins = process.trace.origins
    fresh = [e for e in process.trace.events[start:] if e.action == "alloc"]
    return sum(origins[e.allocation].operation == "aten::add" for e in fresh)


def test_the_engine_adds_two_gradients_of_a_tensor_in_place(process: SimulatedProcess) -> None:
    x = torch.empty(256, device="cuda", requires_grad=True)
    y = x * 2
    z = y.sin() + y.cos()
    start = len(process.trace.events)
    z.backward(torch.empty(256, device="cuda"))
    assert additions(process, start) == 0
    assert x.grad is not None and x.grad.device.type == "cuda"


def test_a_referenced_gradient_is_added_out_of_place(process: SimulatedProcess) -> None:
    x = torch.empty(256, device="cuda", requires_grad=True)
    doubled = x + x  # both gradients are the incoming one, which the caller references
    gradient = torch.empty(256, device="cuda")
    start = len(process.trace.events)
    doubled.backward(gradient)
    assert additions(process, start) == 1


def test_python_s_additions_take_memory(process: SimulatedProcess) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0].exp() + gradients[0].exp()

    x = torch.empty(256, device="cuda", requires_grad=True)
    y = Twice.apply(x)
    start = len(process.trace.events)
    y.backward(torch.empty(256, device="cuda"))
    assert additions(process, start) == 1


def test_operations_carry_their_module_in_forward_and_backward(process: SimulatedProcess) -> None:
    model = placed(process, net())
    process.recorder.stage = "forward"
    loss = model(torch.empty(8, 64, device="cuda")).sum()
    loss.backward()
    modules = {
        phase: {o.module for o in process.trace.origins if o.phase == phase} for phase in ("forward", "backward")
    }
    assert modules["forward"] >= {"0", "1.0", "1.1", "2"}
    assert modules["backward"] >= {"0", "1.0", "1.1", "2"}
    gradient_of = {
        process.recorder.number_of(p.grad): name for name, p in model.named_parameters() if p.grad is not None
    }
    for number, name in gradient_of.items():
        assert number is not None
        assert process.trace.origins[number].module == name.rpartition(".")[0]
    assert len(gradient_of) == 6


def test_a_tensor_without_name_gets_its_class(process: SimulatedProcess) -> None:
    with torch.device("meta"):
        stranger = nn.Linear(8, 8)
    stranger(torch.empty(2, 8, device="cuda"))
    assert process.trace.origins[-1].module == "Linear"


def test_an_exception_leaves_no_module_behind(process: SimulatedProcess) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    with pytest.raises(ValueError):
        nn.Sequential(Fails())(torch.empty(2, device="cuda"))
    assert process.modules.current() == ""


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_marked(process: SimulatedProcess, use_reentrant: bool) -> None:
    model = placed(process, net())
    x = torch.empty(8, 64, device="cuda", requires_grad=True)
    process.recorder.stage = "forward"
    loss = checkpoint(model, x, use_reentrant=use_reentrant).sum()
    process.recorder.stage = "other"
    assert "recompute" not in [mark.name for mark in process.trace.marks]
    loss.backward()
    names = [mark.name for mark in process.trace.marks]
    assert names.count("recompute") == names.count("recompute end") == 1
    begin, end = (next(m.event for m in process.trace.marks if m.name == n) for n in ("recompute", "recompute end"))
    born = {e.allocation: i for i, e in enumerate(process.trace.events) if e.action == "alloc"}
    again = [number for number, origin in enumerate(process.trace.origins) if origin.phase == "recompute"]
    assert again
    assert all(begin <= born[number] <= end for number in again)
    assert {process.trace.origins[number].module for number in again} >= {"0", "1.0", "1.1"}


def test_checkpointing_saves_less(process: SimulatedProcess) -> None:
    peaks = []
    for use in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
        placed(process, model)
        x = torch.empty(512, 256, device="cuda", requires_grad=True)
        start = len(process.trace.events)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if use else layer(x)
        x.sum().backward()
        peaks.append(peak(process, start))
        del x
    assert peaks[1] < 0.7 * peaks[0]


def test_the_first_label_is_kept(process: SimulatedProcess) -> None:
    tensor = torch.empty(256, device="cuda")
    number = process.recorder.number_of(tensor)
    assert number is not None
    process.recorder.label(tensor, "gradient")
    process.recorder.label(tensor, "weight")
    assert process.trace.labels[number] == "gradient"


def test_views_take_nothing_and_in_place_operations_neither(process: SimulatedProcess) -> None:
    tensor = torch.empty(16, 16, device="cuda")
    start = len(process.trace.events)
    tensor.view(256).t().unsqueeze(0)[0].mul_(2).add_(1)
    tensor.zero_()
    assert process.trace.events[start:] == []


def test_equal_convolutions_of_a_thread_share_their_choice_of_a_plan(process: SimulatedProcess) -> None:
    images = torch.empty((4, 64, 56, 56), device="cuda", requires_grad=True)
    one, other = (torch.empty((64, 64, 3, 3), device="cuda", requires_grad=True) for _ in range(2))
    wide = torch.empty((128, 64, 3, 3), device="cuda", requires_grad=True)

    def choices(*weights: torch.Tensor) -> list[int]:
        start = len(process.trace.origins)
        for weight in weights:
            torch.nn.functional.conv2d(images, weight).sum().backward()
        return [choice for number, choice in process.trace.choices.items() if number >= start]

    first = choices(one)
    assert len(first) == len(set(first)) == 3  # forward, both gradients
    assert choices(other) == first
    assert not set(choices(wide)) & set(first)
    assert {process.trace.origins[number].operation for number in process.trace.choices} == {
        "aten::convolution (cudnn_workspace)",
        "aten::convolution_backward (cudnn_workspace)",
    }
