"""Recurrent layers through cuDNN, above autograd: on meta tensors PyTorch would unroll them step by step.

Shapes: T steps, B batch, L layers, R directions, H hidden size, P size of an output (H, or a projection's).
Source: aten/src/ATen/native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward``), torch 2.9-2.13.

cuDNN tells reserve and workspace only at run time. Assumed here: the reserve keeps, for each step, layer and direction,
the gates and, for an LSTM, the cell and its activation, and a byte for each value that dropout may drop between layers;
the workspace holds the gates of all steps of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
_KEPT_BESIDE_GATES = {"RNN_TANH": 0, "RNN_RELU": 0, "GRU": 1, "LSTM": 2}


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
        kept = cells * self.num_layers * (_GATES[self.mode] + _KEPT_BESIDE_GATES[self.mode]) * element_bytes
        return kept + (cells * (self.num_layers - 1) if self.dropout > 0 else 0)

    def workspace_bytes(self, steps_and_batch: int, hidden: int, element_bytes: int) -> int:
        """What one call takes for itself."""
        return steps_and_batch * hidden * _GATES[self.mode] * (2 if self.bidirectional else 1) * element_bytes


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
        ordered = _steps_first(layer, data).contiguous()
        size, out_size = hidden[-1].shape[-1], hidden[0].shape[-1]
        rows = ordered.shape[:-1].numel()
        output = data.new_empty((*ordered.shape[:-1], out_size * (2 if layer.bidirectional else 1)))
        after = tuple(torch.empty_like(state) for state in hidden)
        workspace = _buffer(data, layer.workspace_bytes(rows, size, data.element_size()))
        reserve = _buffer(data, layer.reserve_bytes(rows, size, data.element_size()))
        del ordered, workspace
        output = _steps_first(layer, output)
        ctx.layer, ctx.rows, ctx.size, ctx.states = layer, rows, size, states
        ctx.save_for_backward(data, reserve, output, *hidden, *weights)
        return (output, *after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        data, _, _, *tensors = ctx.saved_tensors
        hidden, weights = tensors[: ctx.states], tensors[ctx.states :]
        ordered = _steps_first(ctx.layer, data).contiguous()
        of_output = _steps_first(ctx.layer, gradients[0]).contiguous()
        of_data = _steps_first(ctx.layer, torch.empty_like(ordered))
        of_hidden = [torch.empty_like(state) for state in hidden]
        workspace = _buffer(data, ctx.layer.workspace_bytes(ctx.rows, ctx.size, data.element_size()))
        flat = data.new_zeros(sum(weight.numel() for weight in weights))
        of_weights = [part.view_as(weight) for part, weight in zip(_split(flat, weights), weights, strict=True)]
        del ordered, of_output, workspace
        return (None, of_data, None, *of_hidden, *of_weights)


def _split(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.split(flat, [weight.numel() for weight in weights])


def _steps_first(layer: Recurrence, tensor: torch.Tensor) -> torch.Tensor:
    """[B, T, .] as [T, B, .], and back."""
    return tensor.transpose(0, 1) if layer.batch_first and tensor.dim() == 3 else tensor


def _buffer(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_empty(size, dtype=torch.uint8)
