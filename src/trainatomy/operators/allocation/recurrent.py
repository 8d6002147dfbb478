"""Recurrent layers through cuDNN, above autograd: on meta tensors PyTorch would unroll them step by step.

Shapes: T steps, B batch, L layers, R directions, H hidden size, P size of an output (H, or a projection's).

Modules put the weights of a layer into one buffer (``flatten_parameters``), for types that cuDNN accepts by
torch/backends/cudnn/__init__.py (``is_acceptable``), which leaves out bfloat16. Weights that are not in one buffer are
copied into one at each call.

Source: aten/src/ATen/native/cudnn/RNN.cpp (``_cudnn_rnn``, ``_cudnn_rnn_backward``), torch 2.9-2.13, and the order of
allocations in recorded trainings. The sizes of cuDNN's own buffers are in ``cudnn.recurrence``.

Recurrent cells (``nn.LSTMCell``, ``nn.GRUCell``), which CUDA runs with fused kernels, above autograd.

On meta tensors PyTorch would run a sequence of smaller operations, which save other tensors.  The fused kernels save a
workspace: four numbers for each of an LSTM's hidden states, five for a GRU's.

Source: aten/src/ATen/native/RNN.cpp (``LSTMCell``, ``GRUCell``) and cuda/RNN.cu, torch 2.9-2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.operators.allocation.cudnn.recurrence import Recurrent, bias_numbers, dropout_state_bytes
from trainatomy.operators.allocation.plan import Processor

_AUTOCAST = torch.float16
"""Autocast's type for recurrent layers, even if its general type is another (aten/src/ATen/cudnn/AutocastRNN.cpp)."""
_FLATTENED = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The architecture of a recurrent layer; ``mode`` is that of ``torch.nn.RNNBase``.

    ``packed_steps``: steps of the longest of packed sequences; 0: the sequences are as long as each other.
    """

    mode: str
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    has_biases: bool = True
    packed_steps: int = 0

    @property
    def kind(self) -> str:
        """RNN, GRU or LSTM."""
        return self.mode.split("_")[0]

    @property
    def directions(self) -> int:
        """Number of directions: 1 or 2."""
        return 2 if self.bidirectional else 1

    def numbers(self, weights: Sequence[torch.Tensor], hidden: int) -> int:
        """Return the elements of a flat buffer of ``weights``, which has room for biases also where there are none."""
        room = 0 if self.has_biases else bias_numbers(self.kind, hidden, self.num_layers, self.directions)
        return sum(weight.numel() for weight in weights) + room

    def cudnn_layer(self, data: torch.Tensor, states: Sequence[torch.Tensor]) -> Recurrent:
        """Return the layer as cuDNN is called for ``data`` [T, B, input], or [sum of T, input] of packed sequences."""
        rows, batch = data.shape[:-1].numel(), states[-1].shape[-2]
        outputs, size = states[0].shape[-1], states[-1].shape[-1]
        return Recurrent(
            kind=self.kind,
            dtype=data.dtype,
            input_size=data.shape[-1],
            hidden=size,
            layers=self.num_layers,
            directions=self.directions,
            dropout=self.dropout > 0,
            rows=rows,
            steps=self.packed_steps or -(-rows // batch),
            batch=batch,
            projection=0 if outputs == size else outputs,
            packed=self.packed_steps > 0,
        )


class RecurrentLayers:
    """The recurrent layers of one process; it keeps the random states of dropout."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._dropout_state: torch.Tensor | None = None

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """Return the replacements of the builtins that modules call."""
        names = {torch.lstm: "LSTM", torch.gru: "GRU", torch.rnn_tanh: "RNN_TANH", torch.rnn_relu: "RNN_RELU"}
        return {builtin: self._function(mode) for builtin, mode in names.items()}

    def _function(self, mode: str) -> Callable[..., Any]:
        def call(data: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
            return self._run(mode, data, *rest)

        return call

    def _run(self, mode: str, data: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        """Run a layer with the arguments of ``torch.lstm`` and the like; autocast computes in half precision.

        The arguments are (input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first), or with
        the batch sizes of packed sequences before hx and no batch_first.
        """
        self._processor.need_cuda("a recurrent layer (MIOpen)")
        packed = len(rest) == 8 and isinstance(rest[2], (list, tuple))
        hidden, weights, has_biases, layers, dropout, train, bidirectional = rest[1:] if packed else rest[:7]
        steps = rest[0].numel() if packed else 0
        layer = Recurrence(mode, layers, dropout, train, bidirectional, not packed and rest[7], has_biases, steps)
        states = (hidden,) if isinstance(hidden, torch.Tensor) else tuple(hidden)
        if train and dropout > 0 and self._dropout_state is None:
            self._dropout_state = _buffer(data, dropout_state_bytes(self._processor.multiprocessors))
        if torch.is_autocast_enabled("cuda"):
            weights = _cast(layer, states, weights)
            states = tuple(state.to(_AUTOCAST) for state in states)
            data = data.to(_AUTOCAST)
        return recurrent(layer, data, states, weights)


@contextlib.contextmanager
def flattening() -> Iterator[None]:
    """Let modules put their weights into one buffer, as they do on a GPU with cuDNN, while this is open."""
    with mock.patch.object(nn.RNNBase, "flatten_parameters", _flatten):
        yield


def _flatten(module: nn.RNNBase) -> None:
    """Flatten as ``RNNBase.flatten_parameters``: zeros, into which each weight is copied and then points."""
    weights: list[Any] = module._flat_weights
    if len(weights) != len(module._flat_weights_names) or not all(isinstance(one, torch.Tensor) for one in weights):
        return
    first = weights[0]
    if first.dtype not in _FLATTENED or not all(one.is_cuda and one.dtype == first.dtype for one in weights):
        return
    layer = Recurrence(
        module.mode, module.num_layers, module.dropout, module.training, module.bidirectional, False, module.bias
    )
    with torch.no_grad():
        flat = first.new_zeros(layer.numbers(weights, module.hidden_size))
        for weight, part in zip(weights, _split(flat, weights), strict=True):
            weight.data = part.view_as(weight)


def _cast(layer: Recurrence, states: Sequence[torch.Tensor], weights: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Cast as autocast's ``_cudnn_rnn_cast_reflatten``: one buffer of the other type."""
    if all(weight.dtype == _AUTOCAST for weight in weights):
        return weights
    cast: Sequence[torch.Tensor] = _CastFlat.apply(layer.numbers(weights, states[-1].shape[-1]), *weights)
    return cast


class _CastFlat(torch.autograd.Function):
    """Weights as views of one buffer in half precision; gradients are cast back one by one, the last first."""

    @staticmethod
    def forward(ctx: Any, numbers: int, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        flat = weights[0].new_zeros(numbers, dtype=_AUTOCAST)
        parts = _split(flat, weights)
        return tuple(part.view_as(weight).copy_(weight) for part, weight in zip(parts, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = list(zip(gradients, ctx.dtypes, strict=True))
        cast = [gradient.to(dtype) for gradient, dtype in reversed(pairs)]
        return (None, *reversed(cast))


def recurrent(
    layer: Recurrence, data: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return output [T, B, R·P], hidden state [L·R, B, P] and, for an LSTM, cell [L·R, B, H].

    Args:
        layer: the architecture.
        data: [T, B, input]; data and output are [B, T, .] with ``batch_first`` and [sum of T, .] of packed sequences.
        hidden: the initial states.
        weights: in cuDNN's order, as ``torch.nn.RNNBase._flat_weights``.
    """
    return _CudnnRecurrence.apply(layer, data, len(hidden), *hidden, *weights)


class _CudnnRecurrence(torch.autograd.Function):
    """``_cudnn_rnn`` with its arguments in its order.

    Gradients of all weights are in one buffer, unless the layer has no biases, for which the buffer keeps room: then
    each is copied out of it.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: Recurrence, data: torch.Tensor, states: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden, weights = tensors[:states], tensors[states:]
        ordered = _steps_first(layer, data).contiguous()
        cudnn_layer = layer.cudnn_layer(ordered, hidden)
        output = data.new_empty((*ordered.shape[:-1], hidden[0].shape[-1] * layer.directions))
        after = tuple(torch.empty_like(state) for state in hidden)
        numbers = layer.numbers(weights, cudnn_layer.hidden)
        flat = None if _lie_together(weights) else data.new_empty(numbers)
        with one_operation("aten::_cudnn_rnn", ordered, *hidden, *weights, **_scalars(layer)) as results:
            workspace = _buffer(data, cudnn_layer.workspace(training=layer.train))
            reserve = _buffer(data, cudnn_layer.reserve() if layer.train else 0)
            results += [output, *after, reserve]
        del workspace
        results.clear()
        del ordered
        output = _steps_first(layer, output)
        ctx.layer, ctx.cudnn_layer, ctx.states, ctx.numbers = layer, cudnn_layer, states, numbers
        ctx.save_for_backward(data, reserve, flat, output, *hidden, *weights)
        return (output, *after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        data, _, _, _, *tensors = ctx.saved_tensors
        hidden, weights = tensors[: ctx.states], tensors[ctx.states :]
        layer: Recurrence = ctx.layer
        size = ctx.cudnn_layer.workspace(training=True, backward=True)
        with one_operation(
            "aten::_cudnn_rnn_backward", gradients[0], data, *hidden, *weights, **_scalars(layer)
        ) as made:
            of_data, *of_hidden = _input_gradients(layer, data, gradients[0], hidden, size)
            ordered = _steps_first(layer, data).contiguous()
            flat = data.new_zeros(ctx.numbers)
            workspace = _buffer(data, size)
            of_weights = [part.view_as(weight) for part, weight in zip(_split(flat, weights), weights, strict=True)]
            if not layer.has_biases:
                of_weights = [part.clone() for part in of_weights]
            del workspace
            del ordered
            made += [of_data, *of_hidden, flat]
        made.clear()
        return (None, *_not_twice(of_data), None, *_not_twice(*of_hidden, *of_weights))


def _not_twice(*gradients: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return gradients that raise PyTorch's error where they are differentiated: cuDNN has no second derivative."""
    if not torch.is_grad_enabled():
        return gradients
    text = "the derivative for '_cudnn_rnn_backward' is not implemented: disable cuDNN while the RNN runs"
    error: Any = torch._C._functions.DelayedError(text, len(gradients))
    raising: Any = error(*(one.detach().requires_grad_() for one in gradients))
    return raising if len(gradients) > 1 else (raising,)


def _scalars(layer: Recurrence) -> dict[str, Any]:
    dropout = layer.dropout if layer.train else 0.0
    named = {"mode": layer.mode, "num_layers": layer.num_layers, "bidirectional": layer.bidirectional}
    return {**named, "dropout": dropout} if dropout else named


def _lie_together(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether all weights are in one buffer."""
    return len({weight.untyped_storage()._cdata for weight in weights}) == 1


def _input_gradients(
    layer: Recurrence, data: torch.Tensor, of_output: torch.Tensor, hidden: Sequence[torch.Tensor], workspace_bytes: int
) -> list[torch.Tensor]:
    """Return the gradients of data and hidden states (``_cudnn_rnn_backward_input``)."""
    ordered = _steps_first(layer, data).contiguous()
    strided = _steps_first(layer, of_output).contiguous()
    of_data = torch.empty_like(ordered)
    of_hidden = [torch.empty_like(state) for state in hidden]
    workspace = _buffer(data, workspace_bytes)
    del workspace, strided, ordered
    return [_steps_first(layer, of_data), *of_hidden]


def _split(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the parts of ``flat`` that hold ``weights``; the room for missing biases is left out."""
    sizes = [weight.numel() for weight in weights]
    return torch.split(flat[: sum(sizes)], sizes)


def _steps_first(layer: Recurrence, tensor: torch.Tensor) -> torch.Tensor:
    """Exchange [B, T, .] and [T, B, .]."""
    return tensor.transpose(0, 1) if layer.batch_first and tensor.dim() == 3 else tensor


def _buffer(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_empty(size, dtype=torch.uint8)


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
