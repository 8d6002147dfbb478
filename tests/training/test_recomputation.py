"""Which calls of modules and functions are recomputation, however a layer is checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainatomy.simulator.modules import ModuleTracker


class Layer(nn.Module):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).sin()).cos()  # work between calls of modules
        return result


class Model(nn.Module):
    def __init__(self, call: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = self.call(layer, x)
        return x.square().mean()


class Operations(TorchDispatchMode):
    """Operator, module, and whether it runs again, for each operation."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.seen: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((func.__name__, self.tracker.current(), self.tracker.recomputing))
        self.tracker.operation()
        return result


class CheckpointsForward(Layer):
    """As layers of transformers 5.24, whose hooks run outside of the checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return result


class OtherCheckpoint(torch.autograd.Function):
    """A checkpoint of another library, which calls the layer in backward."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def trained(call: Callable[[Layer, torch.Tensor], torch.Tensor]) -> tuple[list[bool], Operations]:
    """Return the beginnings and ends of recomputation, and the operations of a step."""
    reports: list[bool] = []
    model, tracker = Model(call), ModuleTracker(reports.append)
    tracker.learn(model)
    with tracker, Operations(tracker) as operations:
        model(torch.ones(2, 4, requires_grad=True)).backward()
    return reports, operations


def in_forward(reentrant: bool) -> Callable[[Layer, torch.Tensor], torch.Tensor]:
    def call(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        layer.__class__ = CheckpointsForward
        layer.reentrant = reentrant
        result: torch.Tensor = layer(x)
        return result

    return call


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda layer, x: checkpoint(layer, x, use_reentrant=False), id="call"),
        pytest.param(lambda layer, x: checkpoint(layer, x, use_reentrant=True), id="call, reentrant"),
        pytest.param(in_forward(reentrant=False), id="forward"),
        pytest.param(in_forward(reentrant=True), id="forward, reentrant"),
        pytest.param(OtherCheckpoint.apply, id="other library"),
    ],
)
def test_a_layer_runs_again_once_under_its_name(call: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
    reports, operations = trained(call)
    assert reports == [True, False] * 2
    again = [(name, module) for name, module, recomputed in operations.seen if recomputed]
    for layer in ("layers.1", "layers.0"):
        assert ("sin.default", layer) in again
        assert [name for name, module in again if module == f"{layer}.first"].count("addmm.default") == 1
    backward = [module for name, module, recomputed in operations.seen if name == "cos.default" and not recomputed]
    assert backward.count("layers.0") >= 1  # forward's cosine, and that of the gradient of the sine


def test_without_checkpoints_nothing_runs_again() -> None:
    reports, operations = trained(lambda layer, x: layer(x))
    assert not reports
    assert not any(recomputed for _, _, recomputed in operations.seen)


def test_a_gradient_inside_forward_is_no_recomputation() -> None:
    def penalized(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    reports, operations = trained(penalized)
    assert not reports
    assert not any(recomputed for _, _, recomputed in operations.seen)


def test_checkpoints_are_as_before_afterwards() -> None:
    before = torch.utils.checkpoint._CheckpointFrame.__init__, torch.utils.checkpoint.CheckpointFunction.forward
    trained(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    after = torch.utils.checkpoint._CheckpointFrame.__init__, torch.utils.checkpoint.CheckpointFunction.forward
    assert after == before
