"""Recurrent cells (``nn.LSTMCell``, ``nn.GRUCell``), which CUDA runs with fused kernels, above autograd.

On meta tensors PyTorch would run a sequence of smaller operations, which save other tensors.  The fused kernels save a
workspace: four numbers for each of an LSTM's hidden states, five for a GRU's.

Source: aten/src/ATen/native/RNN.cpp (``LSTMCell``, ``GRUCell``) and cuda/RNN.cu, torch 2.9-2.13.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_OF_A_GRU = 5
"""Numbers in the workspace for each hidden state (``GRU_WORKSPACE_MULTIPLIER``)."""
_GATES_OF_A_GRU = 3


def lstm_cell(
    value: Tensor, states: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run ``torch.lstm_cell`` as on CUDA."""
    hidden, cell = states
    gates = value.matmul(w_ih.t()), hidden.matmul(w_hh.t())
    found = torch.ops.aten._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)
    return found[0], found[1]


def gru_cell(
    value: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Run ``torch.gru_cell`` as on CUDA."""
    register_meta()
    gates = value.matmul(w_ih.t()), hidden.matmul(w_hh.t())
    found: Tensor = torch.ops.aten._thnn_fused_gru_cell(*gates, hidden, b_ih, b_hh)[0]
    return found


@cache
def register_meta() -> torch.library.Library:
    """Give the fused operators of a GRU results on meta tensors, which PyTorch does not."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_gru_cell", _gru, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_backward, "Meta")
    return library


def _gru(inputs: Tensor, hiddens: Tensor, hidden: Tensor, b_ih: Any = None, b_hh: Any = None) -> tuple[Tensor, Tensor]:
    workspace = hidden.new_empty((hidden.shape[0], hidden.shape[1] * _OF_A_GRU))
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), workspace


def _gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, width = workspace.shape[0], workspace.shape[1] // _OF_A_GRU * _GATES_OF_A_GRU
    gates = [workspace.new_empty((rows, width)) for _ in range(2)]
    biases = [workspace.new_empty((width,)) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad, memory_format=torch.contiguous_format), *biases
