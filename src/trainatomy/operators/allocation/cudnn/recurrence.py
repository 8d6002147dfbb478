"""Memory of cuDNN's recurrent layers: the reserve that is kept for backward, and the workspace of a call.

cuDNN reports either only at run time. The rules are derived from 133 random layers on an H200 (cuDNN 9.19, torch 2.11)
and match all of their reserves and all but one of their workspaces exactly; of 200 other layers, drawn later, 783 of
800 amounts (``benchmarks/kernels/workspaces.py``). A workspace is that of one of two plans, in training the larger one:

- both: 8 MiB for each layer and direction, the weights without biases, 256 bytes, 8 for each sequence;
- forward: gates and state of one layer at all steps, a copy of the input, some states of each layer;
- backward: buffers at all steps for what flows between layers, as wide as the wider of input and hidden size.

Small hidden sizes use another algorithm with a larger workspace (aten/src/ATen/native/cudnn/RNN.cpp,
``use_rnn_persist_small_h``); PyTorch requests it in bfloat16 too, but the workspace is not larger there. Not measured:
projections, packed sequences, doubles, other GPUs. The number of steps between layers is known for some batch sizes
only and interpolated between them: 2 % of a workspace at most in the layers measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainatomy.operators.allocation.arguments import ceil_div, round_up

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_KEPT = {"RNN": 1, "GRU": 6, "LSTM": 5}
_STATES_FORWARD = {"RNN": 3, "GRU": 5, "LSTM": 10}
_STATES_FORWARD_SMALL = {"RNN": 4, "GRU": 4, "LSTM": 8}
_STATES_BACKWARD = {"RNN": 5, "GRU": 5, "LSTM": 11}
_EXTRA_BACKWARD_SMALL = {"RNN": 9, "GRU": 14, "LSTM": 12}
_SMALL_FORWARD = {"RNN": 384, "GRU": 192, "LSTM": 192}
_SMALL_BACKWARD = {"RNN": 256, "GRU": 128, "LSTM": 128}
_HEADER = 256
_GRAIN = 32
_PRODUCTS = 8 * 2**20
_DROPOUT_STATE = 49_152


def dropout_state_bytes(multiprocessors: int) -> int:
    """Return the random states of all threads, kept from the first training call with dropout on."""
    return _DROPOUT_STATE * multiprocessors


def bias_numbers(kind: str, hidden: int, layers: int, directions: int) -> int:
    """Return the elements of all biases, two of each gate; a flat weight buffer has room for them regardless."""
    return 2 * _GATES[kind] * hidden * layers * directions


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A recurrent call: ``kind`` RNN, GRU or LSTM; ``rows`` steps and sequences, of at most ``steps`` and ``batch``."""

    kind: str
    dtype: torch.dtype
    input_size: int
    hidden: int
    layers: int
    directions: int
    dropout: bool
    rows: int
    steps: int
    batch: int

    def reserve(self) -> int:
        """Return the bytes that a training forward keeps.

        The values of each cell, the values passed between layers, and one bit for each value that dropout may drop
        there (each direction draws a mask of its own).
        """
        cells = self.rows * self.hidden * self.directions
        values = self.layers * _KEPT[self.kind] + self.layers - 1
        masks = (self.layers - 1) * self.directions * _aligned(ceil_div(cells, 8)) if self.dropout else 0
        return _aligned(cells * values * self.dtype.itemsize) + masks + _HEADER

    def workspace(self, *, training: bool, backward: bool = False) -> int:
        """Return the bytes of a call: forward (``training`` or inference) or ``backward`` (inputs or weights)."""
        small = self._is_small(_SMALL_BACKWARD if backward else _SMALL_FORWARD)
        plan = self._forward_plan(small)
        if training:
            dropped = self._outputs if self.dropout and self.directions == 1 else 0
            plan = max(plan + dropped, self._backward_plan(small))
        return self._of_both_plans() + plan

    def _is_small(self, limits: dict[str, int]) -> bool:
        return self.dtype in (torch.float32, torch.float16) and self.hidden <= limits[self.kind]

    @property
    def _state(self) -> int:
        return self.batch * self.hidden * self.dtype.itemsize

    @property
    def _outputs(self) -> int:
        """Outputs of one direction."""
        return self.rows * self.hidden * self.dtype.itemsize

    @property
    def _inputs(self) -> int:
        return _aligned(self.rows * self.input_size * self.dtype.itemsize)

    def _of_both_plans(self) -> int:
        gates = _GATES[self.kind] * self.hidden * self.directions
        weights = sum(
            gates * ((self.hidden * self.directions if layer else self.input_size) + self.hidden)
            for layer in range(self.layers)
        )
        products = self.layers * self.directions * _PRODUCTS
        return products + _aligned(weights * self.dtype.itemsize) + _HEADER + _aligned(8 * self.batch)

    def _forward_plan(self, small: bool) -> int:
        gates = _GATES[self.kind]
        states = (_STATES_FORWARD_SMALL if small else _STATES_FORWARD)[self.kind] * self.directions
        passed = self.directions * (gates + 1) + (4 * gates if small else 0)
        if self.directions == 2:
            passed += 4
            states += 2 if small else 4
        return passed * self._outputs + self._inputs + states * self.layers * self._state

    def _backward_plan(self, small: bool) -> int:
        outputs, inputs = self._outputs, self._inputs
        wider = max(inputs, outputs)
        states = _STATES_BACKWARD[self.kind]
        extra = _EXTRA_BACKWARD_SMALL[self.kind] * outputs if small else 0
        if self.directions == 2:
            between = (6 if self.layers == 1 else 8) * outputs
            return extra + between + 2 * inputs + 4 * wider + (2 * states + 4) * self.layers * self._state
        if self.layers == 1:
            between = outputs
        elif small:
            between = 2 * outputs
        else:
            between = min(self.steps, self._steps_between_layers()) * self._state
        return extra + 2 * outputs + 2 * inputs + wider + (states + small) * self.layers * self._state + between

    def _steps_between_layers(self) -> int:
        """Return how many steps a layer runs ahead: the power of two that gives 128 rows, 256 from batch 64 on."""
        rows = 128 if self.batch < 64 else 256
        ahead = min(32, 2 ** max(0, math.ceil(math.log2(rows / self.batch))))
        return self.layers * ahead + max(8, ahead)


def _aligned(size: int) -> int:
    return round_up(size, _GRAIN)
