"""Recurrent layers through cuDNN, above autograd: on meta tensors PyTorch would unroll them step by step.

Shapes: T steps, B batch, L layers, R directions, H hidden size, P size of an output (H, or a projection's). Source:
aten/src/ATen/native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward``), torch 2.9-2.13.

cuDNN tells reserve and workspace only at run time. Read off an H200 (cuDNN 9.19): the reserve keeps, for each step,
layer and direction, the gates and cell of an LSTM, six values of a GRU, one of a plain layer, what passes between
layers, and 256 bytes.  Assumed: a byte for each value that dropout may drop between layers; a workspace of 8 MiB for
each layer, the weights and the gates of all steps (3 to 7 % off on the H200).

Weights that do not lie in one buffer are copied into one that backward keeps: bfloat16, which ``flatten_parameters``
passes over (torch/backends/cudnn/__init__.py, ``is_acceptable``), and what autocast casts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.world.kernels.whole import one_operation

if TYPE_CHECKING:
    from collections.abc import Sequence

_GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
_KEPT = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 6, "LSTM": 5}
_RESERVE_HEADER = 256
_WORKSPACE_OF_LAYER = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How a recurrent layer is built; ``mode`` is that of ``torch.nn.RNNBase``."""

    mode: str
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    def reserve_bytes(self, steps_and_batch: int, hidden: int, element_bytes: int) -> int:
        """What is kept for backward, for T·B values of ``hidden``; nothing in inference."""
        if not self.train:
            return 0
        directions = 2 if self.bidirectional else 1
        cells = steps_and_batch * hidden * directions
        values = self.num_layers * _KEPT[self.mode] + self.num_layers - 1
        dropped = cells * (self.num_layers - 1) if self.dropout > 0 else 0
        return cells * values * element_bytes + dropped + _RESERVE_HEADER

    def workspace_bytes(self, steps_and_batch: int, hidden: int, weights: int, element_bytes: int) -> int:
        """What one call takes for itself, beside ``weights`` numbers of all layers."""
        gates = steps_and_batch * hidden * _GATES[self.mode] * (2 if self.bidirectional else 1) * self.num_layers
        return self.num_layers * _WORKSPACE_OF_LAYER + (weights + gates) * element_bytes


def lstm(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """``torch.lstm``, of padded or packed sequences."""
    return _called("LSTM", *arguments)


def gru(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """``torch.gru``."""
    return _called("GRU", *arguments)


def rnn_tanh(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """``torch.rnn_tanh``."""
    return _called("RNN_TANH", *arguments)


def rnn_relu(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """``torch.rnn_relu``."""
    return _called("RNN_RELU", *arguments)


def _called(mode: str, data: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """(input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first), or with the batch sizes of
    packed sequences before hx and no batch_first.  Autocast computes in its type (autocast_mode's
    ``_cudnn_rnn_cast_reflatten``)."""
    packed = len(rest) == 8 and isinstance(rest[2], (list, tuple))
    hidden, weights, _, layers, dropout, train, bidirectional = rest[1:] if packed else rest[:7]
    layer = Recurrence(mode, layers, dropout, train, bidirectional, False if packed else rest[7])
    states = (hidden,) if isinstance(hidden, torch.Tensor) else tuple(hidden)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        data, states, weights = data.to(dtype), tuple(s.to(dtype) for s in states), [w.to(dtype) for w in weights]
    return recurrent(layer, data, states, weights)


def recurrent(
    layer: Recurrence, data: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """(output [T, B, R·P], hidden state [L·R, B, P] and, for an LSTM, cell [L·R, B, H]) of ``data`` [T, B, input].

    ``data`` and output are [B, T, .] with ``batch_first`` and [sum of T, .] where sequences are packed. ``weights`` are
    in cuDNN's order, as ``torch.nn.RNNBase._flat_weights`` gives them.
    """
    return _CudnnRecurrence.apply(layer, data, len(hidden), *hidden, *weights)


class _CudnnRecurrence(torch.autograd.Function):
    """Takes what ``_cudnn_rnn`` takes, in its order; gradients of all weights lie in one buffer."""

    @staticmethod
    def forward(
        ctx: Any, layer: Recurrence, data: torch.Tensor, states: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden, weights = tensors[:states], tensors[states:]
        size, out_size = hidden[-1].shape[-1], hidden[0].shape[-1]
        ordered = _steps_first(layer, data).contiguous()
        rows = ordered.shape[:-1].numel()
        output = data.new_empty((*ordered.shape[:-1], out_size * (2 if layer.bidirectional else 1)))
        after = tuple(torch.empty_like(state) for state in hidden)
        numbers = sum(weight.numel() for weight in weights)
        flat = data.new_empty(numbers) if data.dtype == torch.bfloat16 or torch.is_autocast_enabled("cuda") else None
        told: dict[str, Any] = {
            "mode": layer.mode,
            "num_layers": layer.num_layers,
            "bidirectional": layer.bidirectional,
        }
        with one_operation("aten::_cudnn_rnn", ordered, *hidden, *weights, **told) as results:
            workspace = _buffer(data, layer.workspace_bytes(rows, size, numbers, data.element_size()))
            reserve = _buffer(data, layer.reserve_bytes(rows, size, data.element_size()))
            results += [output, *after, reserve]
        del workspace
        results.clear()
        del ordered
        output = _steps_first(layer, output)
        ctx.layer, ctx.rows, ctx.size, ctx.states, ctx.numbers = layer, rows, size, states, numbers
        ctx.save_for_backward(data, reserve, flat, output, *hidden, *weights)
        return (output, *after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        data, _, _, _, *tensors = ctx.saved_tensors
        hidden, weights = tensors[: ctx.states], tensors[ctx.states :]
        size = ctx.layer.workspace_bytes(ctx.rows, ctx.size, ctx.numbers, data.element_size())
        layer = ctx.layer
        told: dict[str, Any] = {
            "mode": layer.mode,
            "num_layers": layer.num_layers,
            "bidirectional": layer.bidirectional,
        }
        with one_operation("aten::_cudnn_rnn_backward", gradients[0], data, *hidden, *weights, **told) as results:
            of_data, *of_hidden = _input_gradients(layer, data, gradients[0], hidden, size)
            ordered = _steps_first(layer, data).contiguous()
            flat = data.new_zeros(ctx.numbers)
            workspace = _buffer(data, size)
            del workspace
            del ordered
            results += [of_data, *of_hidden, flat]
        results.clear()
        of_weights = [part.view_as(weight) for part, weight in zip(_split(flat, weights), weights, strict=True)]
        return (None, of_data, None, *of_hidden, *of_weights)


def _input_gradients(
    layer: Recurrence, data: torch.Tensor, of_output: torch.Tensor, hidden: Sequence[torch.Tensor], workspace_bytes: int
) -> list[torch.Tensor]:
    """Gradients of data and hidden states (``_cudnn_rnn_backward_input``)."""
    ordered = _steps_first(layer, data).contiguous()
    strided = _steps_first(layer, of_output).contiguous()
    of_data = torch.empty_like(ordered)
    of_hidden = [torch.empty_like(state) for state in hidden]
    workspace = _buffer(data, workspace_bytes)
    del workspace, strided, ordered
    return [_steps_first(layer, of_data), *of_hidden]


def _split(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.split(flat, [weight.numel() for weight in weights])


def _steps_first(layer: Recurrence, tensor: torch.Tensor) -> torch.Tensor:
    """[B, T, .] as [T, B, .], and back."""
    return tensor.transpose(0, 1) if layer.batch_first and tensor.dim() == 3 else tensor


def _buffer(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_empty(size, dtype=torch.uint8)
