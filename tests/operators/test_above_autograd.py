"""Functions that CUDA runs as one kernel, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from trainatomy.operators.allocation import above_autograd, recurrent
from trainatomy.operators.allocation.meta import meta_kernels
from trainatomy.operators.allocation.plan import Processor

LAYERS = recurrent.RecurrentLayers(Processor((9, 0), 132, (2, 11))).functions()


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with meta_kernels():
        yield


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_rms_norm_is_one_node_unless_types_differ() -> None:
    data, weight = meta(2, 5, 16).requires_grad_(), meta(16).requires_grad_()
    out = above_autograd.rms_norm(data, [16], weight, 1e-6)
    assert [t.shape for t in out.grad_fn.saved_tensors if t is not None] == [(2, 5, 16), (16,), (2, 5, 1)]
    out.sum().backward()
    assert data.grad is not None and weight.grad is not None and weight.grad.shape == (16,)
    mixed = above_autograd.rms_norm(meta(2, 16, dtype=torch.bfloat16), [16], weight)
    assert mixed.shape == (2, 16)
    assert type(mixed.grad_fn).__name__ != type(out.grad_fn).__name__


def test_the_gradient_of_rms_norm_can_be_differentiated() -> None:
    data, weight = meta(4, 8).requires_grad_(), meta(8).requires_grad_()
    out = above_autograd.rms_norm(data, [8], weight)
    made = torch.autograd.grad(out.square().sum(), [data, weight], create_graph=True)
    plain = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    real = torch.autograd.grad(functional.rms_norm(plain[0], [8], plain[1]).square().sum(), plain, create_graph=True)
    for found, wanted in zip(made, real, strict=True):
        assert found.shape == wanted.shape and found.requires_grad
    twice = torch.autograd.grad(sum(one.square().sum() for one in made), [data, weight])  # type: ignore[union-attr]
    assert [one.shape for one in twice] == [(4, 8), (8,)]


def test_recurrent_layers_cannot_be_differentiated_twice() -> None:
    data = meta(5, 2, 8).requires_grad_()
    layer = torch.nn.LSTM(8, 16, device="meta")
    states = [meta(1, 2, 16), meta(1, 2, 16)]
    out = LAYERS[torch.lstm](data, states, layer._flat_weights, True, 1, 0.0, True, False, False)[0]
    (gradient,) = torch.autograd.grad(out.sum(), data, create_graph=True)
    with pytest.raises(RuntimeError, match="_cudnn_rnn_backward"):
        gradient.sum().backward()


def test_strided_linear_adds_its_bias_in_place() -> None:
    data = meta(4, 3, 8).transpose(0, 1)
    weight, bias = meta(6, 8).requires_grad_(), meta(6).requires_grad_()
    out = above_autograd.linear(data, weight, bias)
    assert out.shape == (3, 4, 6)
    assert out._version == 1
    assert above_autograd.linear(meta(3, 4, 8), weight, bias)._version == 0


def test_one_hot_and_softmax() -> None:
    assert above_autograd.one_hot(torch.tensor([0, 2]), 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    half = meta(2, 3, dtype=torch.float16).requires_grad_()
    wide = above_autograd.softmax(half, -1, torch.float32)
    assert wide.dtype == torch.float32
    wide.sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.float16
    assert above_autograd.log_softmax(meta(2, 3), -1).dtype == torch.float32


def test_recurrent_layers_accept_the_arguments_of_python() -> None:
    layer = torch.nn.GRU(8, 16, batch_first=True, device="meta")
    out, state = LAYERS[torch.gru](meta(2, 5, 8), meta(1, 2, 16), layer._flat_weights, True, 1, 0.0, True, False, True)
    assert (out.shape, state.shape) == ((2, 5, 16), (1, 2, 16))
    sizes = torch.tensor([2, 2, 1])
    packed, *_ = LAYERS[torch.lstm](
        meta(5, 8),
        sizes,
        (meta(1, 2, 16), meta(1, 2, 16)),
        torch.nn.LSTM(8, 16, device="meta")._flat_weights,
        True,
        1,
        0.0,
        True,
        False,
    )
    assert packed.shape == (5, 16)


def test_fused_sgd_and_channels_last_convolutions_run_without_data() -> None:
    weight = torch.nn.Parameter(meta(4))
    weight.grad = meta(4)
    torch._fused_sgd_(
        [weight.detach()],
        [weight.grad],
        [meta(4)],
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    images = meta(2, 8, 4, 4).to(memory_format=torch.channels_last)
    filters = meta(6, 8, 3, 3).requires_grad_()
    out = torch.conv2d(images, filters, stride=2, padding=1)
    assert out.shape == (2, 6, 2, 2)
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.sum().backward()
    assert filters.grad is not None and filters.grad.shape == filters.shape
    assert torch.conv_transpose2d(meta(2, 8, 4, 4), meta(8, 3, 2, 2), stride=2).shape == (2, 3, 8, 8)


def test_batch_norm_by_cudnn_copies_what_is_strided_for_good() -> None:
    weight, bias, mean, variance = (meta(8) for _ in range(4))
    strided = meta(4, 6, 8).transpose(1, 2).requires_grad_()
    out = above_autograd.batch_norm(strided, weight, bias, mean, variance, True, 0.1, 1e-5, True)
    assert out.is_contiguous() and "Clone" in str(out.grad_fn.next_functions)  # type: ignore[union-attr]
    own = above_autograd.batch_norm(strided.bfloat16(), weight, bias, mean, variance, True, 0.1, 1e-5, True)
    assert own.stride() == strided.stride()


@pytest.mark.parametrize(
    ("of", "layout"),
    [
        (lambda x: torch.nn.functional.layer_norm(x, [8]), "dense"),
        (lambda x: torch.log_softmax(x, 1), "dense"),
        (lambda x: torch.nn.functional.glu(torch.cat([x, x], -1), -1), "dense"),
        (lambda x: torch.nn.functional.mse_loss(x, torch.zeros_like(x), reduction="none"), "dense"),
        (lambda x: torch.nn.functional.elu(x), "as the gradient"),
        (lambda x: torch.nn.functional.hardswish(x), "as the gradient"),
    ],
)
def test_gradients_lie_as_cuda_lays_them(of: Callable[[torch.Tensor], torch.Tensor], layout: str) -> None:
    data = meta(4, 6, 8).requires_grad_()
    out = of(data)
    strided = meta(4, out.shape[2], 6).transpose(1, 2)
    (gradient,) = torch.autograd.grad(out, data, strided)
    assert gradient.is_contiguous() == (layout == "dense")


def test_weights_of_a_recurrent_layer_lie_in_one_buffer() -> None:
    layer = torch.nn.LSTM(8, 16, num_layers=2, bias=False, device="meta")
    with recurrent.flattening(), mock.patch.object(torch.Tensor, "is_cuda", True):
        layer.flatten_parameters()
        assert len({weight.untyped_storage()._cdata for weight in layer.parameters()}) == 1
        half = torch.nn.LSTM(8, 16, device="meta", dtype=torch.bfloat16)
        half.flatten_parameters()
        assert len({weight.untyped_storage()._cdata for weight in half.parameters()}) == 4
    numbers = sum(weight.numel() for weight in layer.parameters())
    assert next(layer.parameters()).untyped_storage().nbytes() == 4 * (numbers + 2 * 2 * 4 * 16)


@pytest.mark.parametrize(
    ("run", "replaced"),
    [
        (lambda x: x.prod(1), lambda x: above_autograd.prod(x, 1)),
        (lambda x: x.prod(0, keepdim=True), lambda x: above_autograd.prod(x, 0, keepdim=True)),
        (lambda x: x.cumprod(1), lambda x: above_autograd.cumprod(x, 1)),
        (
            lambda x: functional.binary_cross_entropy_with_logits(
                x, x.detach().abs(), pos_weight=torch.full((5,), 3.0)
            ),
            lambda x: above_autograd.binary_cross_entropy_with_logits(x, x.detach().abs(), None, torch.full((5,), 3.0)),
        ),
    ],
    ids=["product", "kept", "running", "logits"],
)
def test_gradients_are_those_of_pytorch(run: Any, replaced: Any) -> None:
    x = torch.linspace(0.2, 1.9, 20).view(4, 5).requires_grad_()
    expected, found = run(x), replaced(x)
    weights = torch.arange(1.0, 1 + expected.numel()).view(expected.shape)
    assert torch.allclose(expected, found)
    gradients = [torch.autograd.grad((each * weights).sum(), x)[0] for each in (expected, found)]
    assert torch.allclose(*gradients)
