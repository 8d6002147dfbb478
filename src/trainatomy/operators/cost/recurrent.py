"""Recurrent layers of cuDNN: one product for all that does not depend on the previous time step, the rest step by step.

Each layer and direction computes gates x hidden numbers from [inputs + hidden]. The inputs' part is one product of
[steps x batch, inputs]. The rest is computed in one of two ways:

- *step by step*: a small product [batch, hidden] and a kernel for the gates, which wait for the previous step. The two
  directions run side by side. A layer of one direction follows the layer below, so that the inputs' products of several
  layers, and the gradients of the inputs, are computed for a few steps at a time.
- *fused*: narrow layers, but for those in bf16, are one kernel for all steps. A multiprocessor keeps the weights in its
  registers and computes one sample of the batch after the other.

Backward goes through the steps in reverse; the gradients of the weights are products over all steps.

Sources: Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs" (arXiv 1604.01946), which is
how cuDNN's standard algorithm works; ``get_algo`` of aten/src/ATen/native/cudnn/RNN.cpp chooses between the two.
Constants: ``catalog/efficiency.yaml``.  Directions and layers run on streams of cuDNN's own, as far as the CPU launches
their kernels as fast as the GPU computes them: behind other work, or where kernels take longer than their launches.
``time_steps`` prices the product of a time step.  The lengths of the parts were read off the numbers of kernels of 570
networks.
"""

from __future__ import annotations

from functools import cache
from math import ceil, log2
from typing import Any, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import HALVES, Chip, KernelWork, number, passes_to
from trainatomy.operators.cost.matmul import product
from trainatomy.operators.cost.time_steps import TimeStep, time_step_seconds
from trainatomy.results.operations import Array, Call

_NARROW = {"LSTM": (192, 128), "GRU": (192, 128), "RNN": (384, 256)}
"""Widest hidden states that PyTorch asks cuDNN to fuse, forward and backward."""
_TILE, _WEIGHTS_TILE, _PADDING = 32, 64, 32
"""Sides of the tiles of a time step's products and of those of weights; hidden states of fused layers are padded to
multiples of the last."""
_H200 = 132
"""Multiprocessors of the GPU that was measured."""
_PARTS, _LONG, _LONG_PARTS = 4, 32, 8
"""Parts of a sequence for which the inputs of a layer are multiplied; of plain layers from so many steps on."""
_STEPS_OF_PART = ((64, 4), (32, 8))
"""Time steps of a part of LSTMs and GRUs above a batch, where the sequence has at least two such parts."""
_REGISTERS = 65536
"""32-bit registers of a multiprocessor: what exceeds them is read again at each step."""
_STEP_LAUNCHES, _SPLIT_LAUNCHES = 2, 3
"""Kernels of a time step; of those whose product is split, or zeroed first: backward of TF32 and of misaligned rows."""
_SPLIT_TILE, _SHALLOW, _FEWEST_TILES, _MOST_TILES = 64, 768, 16, {"gated": 35, "RNN": 52}
"""Side of tiles in TF32; the depth from which on, and the tiles between which, products of a time step are split."""
_LAYER_LAUNCHES = {"stepped": (3, 6), "fused": (2, 8)}
"""Kernels of each layer and direction besides those of the time steps, forward and backward."""


class _Recurrence(NamedTuple):
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
        """Return how the other products multiply, and whether rows are aligned."""
        return f"{self.kind}_misaligned" if self.is_misaligned(self.hidden) else self.kind

    @property
    def step_kind(self) -> str:
        """Return how the product of a time step multiplies: the type in 16 bits, and whether rows are aligned."""
        name = self.data.dtype.replace("bfloat", "bf").replace("float", "fp") if self.kind == "half" else self.kind
        return f"{name}_misaligned" if self.is_misaligned(self.hidden) else name

    @property
    def streams(self) -> int:
        """Return how many layers and directions run at once."""
        return 2 if self.directions == 2 else self.layers

    @property
    def steps_at_a_time(self) -> int:
        """Return for how many time steps the inputs' product of a layer is computed at once."""
        if self.is_fused or self.directions == 2 or self.layers == 1:
            return self.steps
        if self.mode == "RNN":
            return max(self.steps // (_LONG_PARTS if self.steps >= _LONG else _PARTS), 1)
        known = (steps for batch, steps in _STEPS_OF_PART if self.batch > batch and self.steps >= 2 * steps)
        return next(known, max(self.steps // _PARTS, 1))

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
        return self.steps * len(self.pairs) * self.launches_of_step + layers + (self.parts - 1) * len(self.pairs)

    @property
    def launches_of_step(self) -> int:
        """Return the number of kernels of a time step of one layer."""
        return _SPLIT_LAUNCHES if self.backward and self._splits_depth else _STEP_LAUNCHES

    @property
    def width(self) -> str:
        """Return the key of the width of numbers among constants."""
        return "half" if self.kind == "half" else "fp32"

    @property
    def _splits_depth(self) -> bool:
        """Return whether the product of a time step in backward splits its depth, which takes a kernel more.

        Aligned TF32 does so where its tiles leave many multiprocessors idle, unless few of them are wide enough for
        another kernel: read off 141 networks, of which nine in ten agree.
        """
        if self.kind != "tf32" or self.is_misaligned(self.hidden):
            return self.kind != "half" or self.is_misaligned(self.hidden)
        tiles = ceil(self.batch / _SPLIT_TILE) * ceil(self.hidden / _SPLIT_TILE)
        if self.batch <= _SPLIT_TILE:
            return self.gates > _SHALLOW
        if self.mode == "RNN":
            return self.gates > _SHALLOW and tiles < _MOST_TILES["RNN"]
        return _FEWEST_TILES < tiles < _MOST_TILES["gated"]


def recurrent(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``_cudnn_rnn`` (data, states, weights) or its backward (gradient, data, states, weights).

    Weights are pairs [gates x hidden, inputs] and [gates x hidden, hidden], layer by layer, directions side by side.
    The permission to use TF32 never makes the time longer.
    """
    chip = chip._replace(tf32=chip.cudnn_tf32)
    work = _work(call, chip)
    if work.rate != "tf32":
        return work
    return work._replace(seconds=min(work.seconds, _work(call, chip._replace(tf32=False)).seconds))


def _work(call: Call, chip: Chip) -> KernelWork:
    one = _recurrence(call, "tf32" if chip.precision("float32") == "tf32" else "fp32")
    parallel = sum(_parallel_seconds(chip, one, pair) for pair in one.pairs)
    if one.is_fused:
        waited = _fused_seconds(chip, one) * one.layers
        stepped = _fused_seconds(chip, one) * len(one.pairs)
    else:
        at_a_time, most = _kernels_at_once(chip, one)
        stepped = one.steps * len(one.pairs) * _step_seconds(chip, one, at_a_time)
        waited = one.steps * len(one.pairs) * _step_seconds(chip, one, most) / most
    beside = 1 if one.parts == 1 else one.layers  # parts of several layers are multiplied at once
    seconds, waited = parallel + stepped, parallel / beside + waited
    weights = sum(weight.elements for pair in one.pairs for weight in pair)
    flop = 2.0 * one.steps * one.batch * weights * (2 if one.backward else 1)
    moved = sum(t.bytes for t in (*call.inputs, *call.outputs)) + one.steps * sum(pair[1].bytes for pair in one.pairs)
    features = (log2(max(one.steps, 1)), log2(max(one.batch, 1)), log2(max(one.hidden, 1)))
    family = f"recurrent.{'fused.' if one.is_fused else ''}{one.pass_name}"
    passes = passes_to(call, moved, "hidden weights read at each time step")
    rate, at_once = chip.precision(one.data.dtype), max(seconds / waited, 1.0)
    return KernelWork(family, features, flop, rate, moved, one.launches, seconds, passes, at_once)


def launches(call: Call) -> int:
    """Return the number of kernels of ``_cudnn_rnn`` or its backward, with TF32 where numbers are fp32."""
    return _recurrence(call, "tf32").launches


def layers(call: Call) -> int:
    """Return the number of layers and directions of ``_cudnn_rnn`` or its backward."""
    return len(_recurrence(call, "tf32").pairs)


def launched_steps(call: Call) -> tuple[int, int]:
    """Return the time steps that the CPU launches one by one, of all layers, and those of layers above another."""
    one = _recurrence(call, "tf32")
    if one.is_fused:
        return 0, 0
    return one.steps * len(one.pairs), one.steps * (len(one.pairs) - one.directions)


def _recurrence(call: Call, fp32: str) -> _Recurrence:
    backward = call.name.endswith("backward")
    data, state = call.inputs[1:3] if backward else call.inputs[:2]
    weights = [tensor for tensor in call.inputs if len(tensor.shape) == 2]
    batch, hidden = state.shape[-2:]
    mode = number(call, "mode")
    return _Recurrence(
        mode=mode if mode in _NARROW else "RNN",
        backward=backward,
        data=data,
        pairs=tuple(zip(weights[::2], weights[1::2], strict=False)),
        directions=2 if number(call, "bidirectional") == "True" else 1,
        steps=data.elements // max(batch * data.shape[-1], 1),
        batch=batch,
        hidden=hidden,
        kind="half" if data.dtype in HALVES else fp32,
    )


def _fused_seconds(chip: Chip, one: _Recurrence) -> float:
    """Return the time of the kernel of one layer and direction."""
    form = _form()["fused"][one.pass_name]
    padded = ceil(one.hidden / _PADDING) * _PADDING
    weights = one.gates // one.hidden * padded**2 / _REGISTERS
    even = form["start_even"] if padded == one.hidden else 0.0
    start = form["start"] + (form["start_weights"] + even) * weights
    step = form["step"] + form["step_weights"] * weights
    step += form["full"] * (weights >= 1) + form["beyond"] * max(weights - 1, 0)
    step *= form["half"] if one.kind == "half" else 1
    return float(ceil(one.batch / chip.multiprocessors) * (start + one.steps * step) * 1e-6)


def _kernels_at_once(chip: Chip, one: _Recurrence) -> tuple[float, float]:
    """Return how many kernels of time steps run at a time, and how many do where all are queued.

    There are more of several layers, and the longer they take.
    """
    form = _form()["at_once"]
    alone_us = _step_seconds(chip, one, 1.0) * 1e6
    most = 1 + (one.streams - 1) ** form["streams"] * alone_us / (alone_us + form["half_us"])
    launch_us = form["launch_us"] * chip.host_pace ** form["pace_power"]
    launched = form["queued"] * alone_us / (one.launches_of_step * launch_us)
    return float(min(max(launched, 1.0), most)), float(most)


def _step_seconds(chip: Chip, one: _Recurrence, at_a_time: float) -> float:
    """Return the time of one step while so many kernels run at a time: its product and its gates."""
    columns, depth = (one.hidden, one.gates) if one.backward else (one.gates, one.hidden)
    tiles = ceil(one.batch / _TILE) * ceil(columns / _TILE)
    step = TimeStep(one.step_kind, one.pass_name, one.batch, columns, depth)
    product_seconds = time_step_seconds(step, at_a_time, chip.multiprocessors)
    share, often = _form()["gates_waiting"][one.pass_name]
    others = (at_a_time - 1) * tiles / chip.multiprocessors * often
    return float(product_seconds * (1 + share * others / (1 + others)) + _gates_seconds(chip, one))


def _gates_seconds(chip: Chip, one: _Recurrence) -> float:
    """Return the time of the gates of one step, longer where what they read is no longer in the cache."""
    first, rest = _form()["gates"][one.mode][one.pass_name][one.width]
    longer, often = _form()["gates_cold"][one.pass_name]
    steps = one.steps * one.layers if one.backward else one.steps_at_a_time
    read = steps * one.batch * one.gates * one.data.itemsize * one.directions
    cold = min(often * read / chip.l2_bytes, 1)
    slower = (read_yaml("efficiency.yaml")["loading"]["bandwidth"] / chip.bandwidth) ** _form()["gates_memory"]
    return float((first + rest * one.batch * one.hidden * 1e-5) * (1 + longer * cold) * slower * 1e-6)


def _parallel_seconds(chip: Chip, one: _Recurrence, pair: tuple[Array, Array]) -> float:
    """Return the time of products that wait for no step: of the inputs; in backward of all gradients."""
    of_inputs, of_hidden = pair
    (gates, inputs), hidden = of_inputs.shape, of_hidden.shape[1]
    rows, samples = one.steps_at_a_time * one.batch, one.steps * one.batch
    longer = _form()["longer"]["fused" if one.is_fused else one.product_kind]
    columns, depth = (inputs, gates) if one.backward else (gates, inputs)
    of_part = _product_seconds(chip, one, rows, columns, depth, (gates, inputs))
    beside = float(longer["inputs" if one.backward else "forward"][one.parts > 1])
    of_data = one.steps / one.steps_at_a_time * of_part * beside
    if not one.backward:
        return of_data
    weights = _weights_seconds(chip, one, gates, inputs, samples)
    for steps in filter(None, (one.steps - 1, 1)):  # the first hidden states lie apart from those of the steps
        weights += _weights_seconds(chip, one, gates, hidden, steps * one.batch)
    return of_data + weights + _bias_seconds(chip, one)


def _weights_seconds(chip: Chip, one: _Recurrence, gates: int, columns: int, samples: int) -> float:
    """Return the time of the gradient of a layer's weights [gates, columns], a sum over samples."""
    start, area, depth = _form()["weights"][one.product_kind]
    tiles = ceil(gates / _WEIGHTS_TILE) * ceil(columns / _WEIGHTS_TILE) * _H200 / chip.multiprocessors
    return float(start * 1e-6 + samples * (tiles * _WEIGHTS_TILE**2 * area * 1e-15 + depth * 1e-9))


def _bias_seconds(chip: Chip, one: _Recurrence) -> float:
    """Return the time of the gradient of one layer's biases: blocks of 32 columns add up row after row."""
    start, each, wide, most, longer, often = _form()["biases"][one.mode][one.width]
    columns, rows = min(one.hidden * min(one.streams, 2) / 1000, most), one.steps * one.batch
    cold = min(often * rows * one.gates * one.data.itemsize * len(one.pairs) / chip.l2_bytes, 1)
    return float(start * 1e-6 + rows * (each + wide * columns) * (1 + longer * cold) * 1e-9)


def _product_seconds(chip: Chip, one: _Recurrence, m: int, n: int, k: int, row: tuple[int, int]) -> float:
    """Return the time of a product of m x k with k x n alone; ``row``: numbers of a row of its factors in memory."""
    kind = one.kind
    if any(one.is_misaligned(size) for size in row):
        kind = f"{kind}_{'odd' if kind == 'half' and any(size % 2 for size in row) else 'misaligned'}"
    return product(chip, kind, one.data.dtype, "nn", 1, m, n, k, "plain").seconds


@cache
def _form() -> dict[str, Any]:
    form: dict[str, Any] = read_yaml("efficiency.yaml")["recurrent"]
    return form
