"""The sizes of a call of one of cuDNN's recurrent layers, and the kernels that it launches.

The inputs of a stack of one direction are multiplied for some steps at a time, so that a layer can follow the layer
below. The rules of these parts were read off 904 passes on an H200 (``lab/timing/records``, recurrent-*), of
which they give the number of products in all, as in 248 other passes on an H200 and an H100.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

from trainatomy.operators.cost.kernel import HALVES, number
from trainatomy.results.operations import Array, Call

_NARROW = {"LSTM": (192, 128), "GRU": (192, 128), "RNN": (384, 256)}
"""Widest hidden states that PyTorch asks cuDNN to fuse, forward and backward."""
_FEWEST_PARTS, _LONGEST_PART = 4, 32
"""Parts of a sequence for which the inputs of a layer are multiplied in forward: more where they have more steps."""
_PLAIN_STEPS, _PLAIN_PARTS = 32, 8
"""Time steps of plain layers beyond which there are so many parts."""
_STEPS_OF_PART = {"forward": ((64, 4), (32, 8)), "backward": ((96, 2), (16, 4), (0, 8))}
"""Time steps of a part above a batch; in forward of LSTMs and GRUs."""
_MOST_PARTS = 40
"""Parts in backward, beyond which each has twice as many steps: 35 are not too many, 50 are."""
_STEP_LAUNCHES, _SPLIT_LAUNCHES = 2, 3
"""Kernels of a time step; of those whose product splits its depth, which takes a fill before it or a sum after it."""
_FEW_SAMPLES, _MANY_SAMPLES, _MOST_SAMPLES = 32, 64, 128
"""Samples of a batch up to which, and beyond which, products get other kernels, and so other rules for when they split.
All depths and tiles below are limits beyond which a time step's product splits its depth, or from which on it does not.
"""
_HALF_GATES, _HALF_PLAIN = 2560, 690
"""16 bits: the depth of gates in backward; of misaligned plain layers with few samples."""
_MISALIGNED_GATES = {"LSTM": (640, 1000), "GRU": (700, inf)}
"""TF32, forward: the depth of misaligned layers with more than few samples, and with many."""
_SHALLOW_GRU = (320, 560)
"""TF32, forward: depths between which a GRU with few samples does."""
_GATES, _GATES_OF_SAMPLE, _GATES_OF_MANY, _GATES_TILES = 800, 20.7, 1600, {"LSTM": 37, "GRU": 35}
"""TF32, backward: the depth of gates, also for each sample; with many samples, for which tiles count, too."""
_PLAIN, _PLAIN_DEPTHS, _PLAIN_TILES, _PLAIN_BACKWARD = 768, (864, 1024), 28, 896
"""Plain layers in fp32, and misaligned ones in TF32; aligned ones: depths with few tiles, and with any; backward."""
_LAYER_LAUNCHES = {"stepped": (3, 6), "fused": (2, 8)}
"""Kernels of each layer and direction besides those of the time steps, forward and backward."""


class Recurrence(NamedTuple):
    """Sizes that the calls of one recurrent network have in common.

    Attributes:
        mode: LSTM, GRU or RNN.
        backward: Whether it is the backward pass.
        data: Input of the first layer [steps, batch, inputs].
        pairs: Weights [gates x hidden, inputs] and [gates x hidden, hidden] of each layer and direction.
        directions: 1 or 2.
        steps: Time steps.
        batch: Samples.
        hidden: Width of the hidden state.
        kind: How its products multiply: half, tf32 or fp32.
        dropped: Outputs between layers that dropout masks: layers but the last, times directions.
    """

    mode: str
    backward: bool
    data: Array
    pairs: tuple[tuple[Array, Array], ...]
    directions: int
    steps: int
    batch: int
    hidden: int
    kind: str
    dropped: int = 0

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return max(len(self.pairs) // self.directions, 1)

    @property
    def gates(self) -> int:
        """Return the columns of a time step's product in forward."""
        return self.pairs[0][1].shape[0]

    @property
    def pass_name(self) -> str:
        """Return the key of this pass among constants."""
        return "backward" if self.backward else "forward"

    @property
    def is_fused(self) -> bool:
        """Return whether all time steps are one kernel."""
        return self.data.dtype != "bfloat16" and self.hidden <= _NARROW[self.mode][self.backward]

    def is_misaligned(self, columns: int) -> bool:
        """Return whether rows that tensor cores multiply do not begin at multiples of 16 bytes."""
        return self.kind != "fp32" and bool(columns * self.data.itemsize % 16)

    @property
    def product_kind(self) -> str:
        """Return how products of hidden states multiply, and whether their rows are aligned."""
        return self.kind_of(self.hidden)

    @property
    def step_kind(self) -> str:
        """Return how the product of a time step multiplies: in bf16 cuBLAS splits that of misaligned rows otherwise."""
        is_apart = self.data.dtype == "bfloat16" and self.is_misaligned(self.hidden)
        return "bf16_misaligned" if is_apart else self.product_kind

    def is_odd(self, *rows: int) -> bool:
        """Return whether rows of 16-bit numbers begin between words of four bytes, for which older kernels run."""
        return self.kind == "half" and any(size % 2 for size in rows)

    def kind_of(self, *rows: int) -> str:
        """Return how a product multiplies whose factors have so many numbers in a row in memory."""
        return f"{self.kind}_misaligned" if any(map(self.is_misaligned, rows)) else self.kind

    @property
    def streams(self) -> int:
        """Return how many layers and directions run at once."""
        return 2 if self.directions == 2 else self.layers

    @property
    def steps_at_a_time(self) -> int:
        """Return for how many time steps the inputs' product of a layer is computed at once."""
        if self.is_fused or self.directions == 2 or self.layers == 1:
            return self.steps
        of_part = next((steps for batch, steps in _STEPS_OF_PART[self.pass_name] if self.batch > batch), 0)
        if self.backward:
            while ceil(self.steps / of_part) > _MOST_PARTS:
                of_part *= 2
            return min(of_part, self.steps)
        if self.mode == "RNN" or not of_part:
            parts = _PLAIN_PARTS if self.mode == "RNN" and self.steps > _PLAIN_STEPS else _FEWEST_PARTS
            while self.steps // parts > _LONGEST_PART:
                parts *= 2
        else:
            parts = max(self.steps // of_part, 1)
        return max(self.steps // parts, 1)

    @property
    def parts(self) -> int:
        """Return the number of parts of the inputs' product."""
        return ceil(self.steps / self.steps_at_a_time)

    @property
    def launches(self) -> int:
        """Return the number of kernels."""
        layers = len(self.pairs) * _LAYER_LAUNCHES["fused" if self.is_fused else "stepped"][self.backward]
        if self.is_fused:
            return layers
        steps = self.steps * len(self.pairs) * self.launches_of_step
        return steps + layers + (self.parts - 1) * len(self.pairs) + self.dropped * (self.parts + 1)

    @property
    def launches_of_step(self) -> int:
        """Return the number of kernels of a time step of one layer."""
        return _SPLIT_LAUNCHES if self.splits_depth else _STEP_LAUNCHES

    @property
    def splits_depth(self) -> bool:
        """Return whether the product of a time step splits its depth, which takes a kernel more.

        Read off the kernels of 4,459 layers on an H200 and an H100, all in 16 bits or TF32, of which 99 in 100 agree;
        none was held out.
        """
        if self.mode == "RNN":
            return self._splits_plain()
        is_misaligned, is_tf32 = self.is_misaligned(self.hidden), self.kind == "tf32"
        is_small, is_large = self.batch <= _FEW_SAMPLES, self.batch > _MANY_SAMPLES
        if not self.backward and is_misaligned:
            return is_tf32 and not is_small and self.hidden > _MISALIGNED_GATES[self.mode][is_large]
        if not self.backward:
            shallow, deep = _SHALLOW_GRU
            return is_tf32 and is_small and self.mode == "GRU" and shallow < self.hidden <= deep
        if self.kind == "fp32" or is_misaligned:
            return True
        if self.kind == "half":
            return self.gates > _HALF_GATES
        if is_large:
            return self.gates > _GATES_OF_MANY and self._tiles(64, 64) < _GATES_TILES[self.mode]
        return self.gates > max(_GATES, _GATES_OF_SAMPLE * self.batch)

    def _splits_plain(self) -> bool:
        """Return the same for a layer without gates."""
        if self.kind == "fp32":
            return self.backward or self.hidden > _PLAIN
        is_small = self.batch <= _FEW_SAMPLES
        if self.kind == "half":
            return self.is_misaligned(self.hidden) and is_small and self.hidden > _HALF_PLAIN
        if self.is_misaligned(self.hidden):
            return self.hidden > _PLAIN
        if self.backward:
            return self.hidden > _PLAIN_BACKWARD
        shallow, deep = _PLAIN_DEPTHS
        is_deep = self.hidden > deep and self.batch <= _MOST_SAMPLES
        return is_small or is_deep or (self.hidden <= shallow and self._tiles(32, 64) <= _PLAIN_TILES)

    def _tiles(self, rows: int, columns: int) -> int:
        """Return the tiles of the hidden states of a time step."""
        return ceil(self.batch / rows) * ceil(self.hidden / columns)

    @property
    def width(self) -> str:
        """Return the key of the width of numbers among constants."""
        return "half" if self.kind == "half" else "fp32"


def launches(call: Call) -> int:
    """Return the number of kernels of ``_cudnn_rnn`` or its backward, with TF32 where numbers are fp32."""
    return recurrence(call, "tf32").launches


def layers(call: Call) -> int:
    """Return the number of layers and directions of ``_cudnn_rnn`` or its backward."""
    return len(recurrence(call, "tf32").pairs)


def directions(call: Call) -> int:
    """Return the number of directions of ``_cudnn_rnn`` or its backward, 1 or 2."""
    return 2 if number(call, "bidirectional") == "True" else 1


def launched_steps(call: Call) -> tuple[int, int]:
    """Return the time steps that the CPU launches one by one, of all layers, and for how many below these wait."""
    one = recurrence(call, "tf32")
    if one.is_fused:
        return 0, 0
    return one.steps * len(one.pairs), one.steps * (len(one.pairs) - one.directions) * one.directions


def misaligned_steps(call: Call) -> int:
    """Return those of the time steps whose products have misaligned rows, for which older kernels run."""
    one = recurrence(call, "tf32")
    return launched_steps(call)[0] * one.is_misaligned(one.hidden)


def launched_parts(call: Call) -> int:
    """Return the products of all layers' inputs beyond the first of each."""
    one = recurrence(call, "tf32")
    return (one.parts - 1) * len(one.pairs)


def recurrence(call: Call, fp32: str) -> Recurrence:
    """Return the sizes of a call; ``fp32``: how numbers of 32 bits multiply (tf32 or fp32)."""
    backward = call.name.endswith("backward")
    data, state = call.inputs[1:3] if backward else call.inputs[:2]
    weights = [tensor for tensor in call.inputs if len(tensor.shape) == 2]
    batch, hidden = state.shape[-2:]
    mode = number(call, "mode")
    both_ways, pairs = directions(call), len(weights) // 2
    return Recurrence(
        mode=mode if mode in _NARROW else "RNN",
        backward=backward,
        data=data,
        pairs=tuple(zip(weights[::2], weights[1::2], strict=False)),
        directions=both_ways,
        steps=data.elements // max(batch * data.shape[-1], 1),
        batch=batch,
        hidden=hidden,
        kind="half" if data.dtype in HALVES else fp32,
        dropped=pairs - both_ways if float(number(call, "dropout", "0")) else 0,
    )
