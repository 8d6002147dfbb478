"""Memory of cuDNN's recurrent layers: the reserve that is kept for backward, and the workspace of a call.

cuDNN reports either only at run time. The rules are derived from 133 random layers on an H200 (cuDNN 9.19, torch 2.11)
and match all of their reserves and all but one of their workspaces exactly; of 200 other layers, drawn later, 783 of
800 amounts (``benchmarks/kernels/workspaces.py``). A workspace is that of one of two plans, in training the larger one:

- both: 8 MiB for each layer and direction, the weights without biases, 256 bytes, 8 for each padded sequence;
- forward: gates and state of one layer at all steps, a copy of the input, some states of each layer;
- backward: buffers at all steps for what flows between layers, as wide as the wider of input and hidden size.

Small hidden sizes use another algorithm with a larger workspace (aten/src/ATen/native/cudnn/RNN.cpp,
``use_rnn_persist_small_h``); PyTorch requests it in bfloat16 too, but the workspace is not larger there. Layers with
projections and packed sequences do not use it. Packed sequences are not copied, so that the copies of data, outputs and
states are missing from their plans. The rules for both were read off 429 layers of an H200 (cuDNN 9.19), of which they
give all but 5 reserves and all but 30 workspaces exactly, and all within 5 %. Not measured: doubles, other GPUs. The
number of steps between layers is known for some batch sizes only and interpolated between them: 2 % of a workspace at
most in the layers measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainatomy.allocator.blocks import round_up
from trainatomy.operators.allocation.plan import ceil_div

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_KEPT = {"RNN": 1, "GRU": 6, "LSTM": 5}
_STATES_FORWARD = {"RNN": 3, "GRU": 5, "LSTM": 10}
_STATES_FORWARD_SMALL = {"RNN": 4, "GRU": 4, "LSTM": 8}
_STATES_BACKWARD = {"RNN": 5, "GRU": 5, "LSTM": 11}
_COPIED_STATES = {"RNN": 2, "GRU": 2, "LSTM": 4}
_STATES_BACKWARD_PACKED = {"RNN": 1, "GRU": 1, "LSTM": 3}
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
    """A recurrent call: ``kind`` RNN, GRU or LSTM; ``rows`` steps and sequences, of at most ``steps`` and ``batch``.

    ``projection``: size of the outputs where an LSTM projects them, else 0; ``packed``: sequences of different lengths
    without padding.
    """

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
    projection: int = 0
    packed: bool = False

    def reserve(self) -> int:
        """Return the bytes that a training forward keeps.

        The values of each cell, the values passed between layers, outputs that are projected before and after it, and
        one bit for each value that dropout may drop between layers (each direction draws a mask of its own, with
        padding).
        """
        cells, outputs = (self.rows * size * self.directions for size in (self.hidden, self.projection))
        values = self.layers * (_KEPT[self.kind] + bool(self.projection)) + self.layers - 1
        padded = self.steps * self.batch * self.directions * (self.projection or self.hidden)
        masks = (self.layers - 1) * self.directions * _aligned(ceil_div(padded, 8)) if self.dropout else 0
        kept = _aligned(cells * values * self.dtype.itemsize) + _aligned(outputs * self.layers * self.dtype.itemsize)
        return kept + masks + _HEADER

    def workspace(self, *, training: bool, backward: bool = False) -> int:
        """Return the bytes of a call: forward (``training`` or inference) or ``backward`` (inputs or weights)."""
        small = self._is_small(_SMALL_BACKWARD if backward else _SMALL_FORWARD)
        plan = self._forward_plan(small)
        if training:
            dropped = self._outputs if self.dropout and self.directions == 1 else 0
            plan = max(plan + dropped, self._backward_plan(small))
        return self._of_both_plans() + plan

    def _is_small(self, limits: dict[str, int]) -> bool:
        if self.projection or self.packed:
            return False
        return self.dtype in (torch.float32, torch.float16) and self.hidden <= limits[self.kind]

    @property
    def _state(self) -> int:
        return self.batch * self.hidden * self.dtype.itemsize

    @property
    def _projected_state(self) -> int:
        return self.batch * self.projection * self.dtype.itemsize

    @property
    def _outputs(self) -> int:
        """Outputs of one direction, before they are projected."""
        return self.rows * self.hidden * self.dtype.itemsize

    @property
    def _projected(self) -> int:
        return self.rows * self.projection * self.dtype.itemsize

    @property
    def _inputs(self) -> int:
        return _aligned(self.rows * self.input_size * self.dtype.itemsize)

    def _of_both_plans(self) -> int:
        gates = _GATES[self.kind] * self.hidden * self.directions
        outputs = self.projection or self.hidden
        weights = self.layers * self.directions * self.hidden * self.projection + sum(
            gates * ((outputs * self.directions if layer else self.input_size) + outputs)
            for layer in range(self.layers)
        )
        products = self.layers * self.directions * _PRODUCTS
        lengths = 0 if self.packed else _aligned(8 * self.batch)
        return products + _aligned(weights * self.dtype.itemsize) + _HEADER + lengths

    def _forward_plan(self, small: bool) -> int:
        gates = _GATES[self.kind]
        states = (_STATES_FORWARD_SMALL if small else _STATES_FORWARD)[self.kind] * self.directions
        passed = self.directions * (gates + 1) + (4 * gates if small else 0)
        if self.directions == 2:
            passed += 4
            states += 2 if small else 4
        inputs, projected, projected_states = self._inputs, 0, 0
        if self.projection:  # half of the states are outputs
            states -= 2 * self.directions
            projected, projected_states = self.directions, 2 * self.directions
        if self.packed:  # data, outputs and states need no copy in another order
            copied = _COPIED_STATES[self.kind] * self.directions
            inputs = 0
            if self.projection:
                projected, projected_states, states = 0, 0, states - copied // 2
            else:
                passed, states = passed - self.directions, states - copied
        of_states = states * self._state + projected_states * self._projected_state
        return passed * self._outputs + inputs + projected * self._projected + self.layers * of_states

    def _backward_plan(self, small: bool) -> int:
        """Return the bytes of the backward plan; without padding, data, outputs and their gradients are not copied."""
        outputs, inputs = self._outputs, self._inputs
        wider = max(inputs, self._projected if self.projection else outputs)
        copies = 0 if self.packed else 2 * inputs + 2 * self.directions * (self._projected or outputs)
        extra = _EXTRA_BACKWARD_SMALL[self.kind] * outputs if small else 0
        return extra + copies + self._between_layers(small) + self._wider_buffers(wider) + self._backward_states(small)

    def _wider_buffers(self, wider: int) -> int:
        return 4 * wider if self.directions == 2 else wider

    def _backward_states(self, small: bool) -> int:
        """Return the bytes of states and their gradients; without padding they are not copied."""
        count = (_STATES_BACKWARD_PACKED if self.packed or self.projection else _STATES_BACKWARD)[self.kind]
        more = 4 if self.directions == 2 else int(small)
        found = (self.directions * count + more) * self._state
        if self.projection and not self.packed:  # half of the copies are of outputs
            half = _COPIED_STATES[self.kind] * self.directions
            found += half * (self._state + self._projected_state)
        return self.layers * found

    def _between_layers(self, small: bool) -> int:
        """Return the bytes of what flows between layers, and of outputs before they are projected."""
        outputs = self._outputs
        before = self.directions * outputs if self.projection else 0
        if self.directions == 2:
            return before + (2 if self.layers == 1 else 4) * outputs
        if self.layers == 1:
            return before + outputs
        if small:
            return 2 * outputs
        return before + min(self.steps, self._steps_between_layers()) * self._state

    def _steps_between_layers(self) -> int:
        """Return how many steps a layer runs ahead: the power of two that gives 128 rows, 256 from batch 64 on."""
        rows = 128 if self.batch < 64 else 256
        ahead = min(32, 2 ** max(0, math.ceil(math.log2(rows / self.batch))))
        return self.layers * ahead + max(8, ahead)


def _aligned(size: int) -> int:
    return round_up(size, _GRAIN)
