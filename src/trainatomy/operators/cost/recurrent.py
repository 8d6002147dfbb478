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
Constants: ``catalog/efficiency.yaml``.  Directions and layers run on streams of cuDNN's own. Layers run beside each
other if the GPU has other work first, or takes longer to compute a time step than the CPU to launch it: else the CPU
launches one layer's part of the sequence, then that of the next, and each is done before the next begins.
``recurrence`` has the sizes and the numbers of kernels, ``recurrent_products`` prices products of steps and inputs.

The products of a recurrent layer, [rows, depth] times [depth, columns], alone and beside others.

They are that of a time step, whose rows are the samples, and that of the inputs for some steps at a time, or of the
gradients of the inputs.  Their tiles walk over the depth at once, if there are as many multiprocessors, each as fast as
it loads its operands, and slower the more of them load.  Which of cuBLAS' kernels run, and whether these split the
depth, is not known: the fastest of several sizes of tiles gives an estimate, and the times of products that were
measured correct it where they are alike (within a factor of about 1.5).

Data: ``catalog/efficiency.yaml`` (form), ``catalog/recurrent_products.csv`` (times of products in networks on an
H200, and on an H100 less what they take longer there; cuDNN 9.19; ``benchmarks/timing/recurrent_points.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from math import ceil, exp, gcd, log, log2, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

from trainatomy.catalog.files import read_text, read_yaml
from trainatomy.lookup import mean_of_nearest
from trainatomy.operators.cost.kernel import Chip, KernelWork, passes_to
from trainatomy.operators.cost.matmul import ProductSizes, product
from trainatomy.operators.cost.recurrence import Recurrence, recurrence
from trainatomy.results.operations import Array, Call

TILES = ((32, 32), (64, 64), (64, 128), (128, 128), (128, 256))
MEASURED_MULTIPROCESSORS = 132
"""Multiprocessors of the GPUs that were measured."""
_BLEND = 3
"""Power by which the time of one tile and that of all tiles at once are blended."""
_NEAREST, _SOFTENING, _UNCHANGED = 5, 0.1, 2.0
"""Measured products that count; what is added to squared distances in doublings; weight of the estimate as it is."""
_LINE_BYTES = 128
"""Bytes of a line of the cache: what begins between lines is read in more pieces."""
_SIDES = 1.4
"""Weight of doublings of columns and depth, those of rows (in whole tiles) being 1: they decide how depth is split."""
_BESIDE = 2.0
"""Weight of squared doublings of the kernels that run at a time."""


class RecurrentProduct(NamedTuple):
    """A product of a recurrent layer.

    Attributes:
        kind: How it multiplies, as in ``catalog/efficiency.yaml``.
        role: ``forward`` or ``backward``: of a time step; ``inputs forward`` or ``inputs backward``: of the inputs.
        rows: Samples, or those of all time steps that are multiplied at once.
        columns: Columns of its result.
        depth: Numbers that each result adds up.
    """

    kind: str
    role: str
    rows: int
    columns: int
    depth: int

    @property
    def unevenness(self) -> float:
        """Return how many times the alignment of the weights' rows in memory halves a line of the cache."""
        width = (self.depth if self.role.endswith("forward") else self.columns) * (4 if "32" in self.kind else 2)
        return log2(_LINE_BYTES / gcd(width, _LINE_BYTES))


class _Measured(NamedTuple):
    """A measured product: logarithms of its sizes and of the kernels at a time, and of its time over the estimate."""

    place: tuple[float, ...]
    ratio: float


def recurrent_product_seconds(one: RecurrentProduct, at_a_time: float, multiprocessors: int) -> float:
    """Return the time of a product while so many kernels run at a time."""
    place = _place_of(one, at_a_time)
    near = sorted(
        (sum((a - b) ** 2 for a, b in zip(each.place, place, strict=True)), each.ratio) for each in _known(one)
    )
    ratio = mean_of_nearest(near[:_NEAREST], _SOFTENING, prior_weight=_UNCHANGED)
    return estimate(one, _form_of(one), at_a_time, multiprocessors) * exp(ratio)


def estimate(one: RecurrentProduct, form: Sequence[float], at_a_time: float, multiprocessors: int) -> float:
    """Return the time of a product by its form, as in ``catalog/efficiency.yaml``."""
    start, each, crowded, together, uneven, *longer = form
    busy = at_a_time**together * crowded
    fastest = min(
        ratio * _waves(ceil(one.rows / rows) * ceil(one.columns / columns), busy, multiprocessors)
        for (rows, columns), ratio in zip(TILES, (1.0, *longer), strict=False)
    )
    return float(start * 1e-6 + one.depth * each * 1e-9 * (1 + uneven * one.unevenness) * fastest)


def _form_of(one: RecurrentProduct) -> Sequence[float]:
    form: Sequence[float] = read_yaml("efficiency.yaml")["recurrent"]["product"][one.kind][one.role]
    return form


def _waves(tiles: int, busy: float, multiprocessors: int) -> float:
    """Return the time of tiles of one size, in times of a tile alone."""
    loading = min(tiles / multiprocessors, 1) * busy
    return float(ceil(tiles / multiprocessors) * (1 + loading**_BLEND) ** (1 / _BLEND))


def _place_of(one: RecurrentProduct, at_a_time: float) -> tuple[float, ...]:
    beside = sqrt(_BESIDE) * log2(max(at_a_time, 1.0))
    rows = ceil(one.rows / TILES[0][0]) * TILES[0][0]
    return log2(max(rows, 1)), _SIDES * log2(max(one.columns, 1)), _SIDES * log2(max(one.depth, 1)), beside


def _known(one: RecurrentProduct) -> list[_Measured]:
    return _measured().get((one.kind, one.role), [])


@cache
def _measured() -> dict[tuple[str, str], list[_Measured]]:
    """Return the measured products by kind and role."""
    found = defaultdict(list)
    for line in read_text("recurrent_products.csv").splitlines():
        if line.startswith("#"):
            continue
        kind, role, rows, columns, depth, at_a_time, microseconds = line.split(",")
        one, beside = RecurrentProduct(kind, role, int(rows), int(columns), int(depth)), float(at_a_time)
        ratio = log(float(microseconds) * 1e-6 / estimate(one, _form_of(one), beside, MEASURED_MULTIPROCESSORS))
        found[kind, role].append(_Measured(_place_of(one, beside), ratio))
    return found


_TILE, _WEIGHTS_TILE, _PADDING = 32, 128, 32
"""Sides of the tiles of a time step's products and of those of weights; hidden states of fused layers are padded to
multiples of the last."""
_REGISTERS, _REGISTER_BYTES = 65536, 4
"""32-bit registers of a multiprocessor: what exceeds them is read again at each step, for each sample."""


class _AtOnce(NamedTuple):
    """How many kernels run while a product does, itself included.

    Attributes:
        steps: That of a time step.
        queued: That of a time step, if all kernels are queued.
        inputs: That of the inputs.
    """

    steps: float = 1.0
    queued: float = 1.0
    inputs: float = 1.0


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
    one = recurrence(call, "tf32" if chip.precision("float32") == "tf32" else "fp32")
    at_once = _AtOnce() if one.is_fused else _kernels_at_once(chip, one)
    at_a_time, most = at_once.steps, at_once.queued
    inputs = sum(_inputs_seconds(chip, one, pair, at_once.inputs) for pair in one.pairs)
    biases = _bias_seconds(chip, one) * len(one.pairs) if one.backward else 0.0
    of_weights = _weights_seconds(chip, one) if one.backward else 0.0
    if one.is_fused:
        waited = _fused_seconds(chip, one) * one.layers
        stepped = _fused_seconds(chip, one) * len(one.pairs)
    else:
        stepped = one.steps * len(one.pairs) * _step_seconds(chip, one, at_a_time)
        waited = one.steps * len(one.pairs) * _step_seconds(chip, one, most) / most
    dropout = _dropout_seconds(one)
    seconds = inputs + biases + of_weights + stepped + dropout
    beside = _form()["queued"]
    # of a stack the inputs' products of all layers run at once, of two directions those of both
    of_inputs = one.layers if one.parts > 1 else 1 + (most - 1) * _form()["at_once"]["inputs"]["both"]
    waited += inputs / of_inputs + biases / beside["biases"] + of_weights / beside["weights"] + dropout
    weights = sum(weight.elements for pair in one.pairs for weight in pair)
    flop = 2.0 * one.steps * one.batch * weights * (2 if one.backward else 1)
    moved = sum(t.bytes for t in (*call.inputs, *call.outputs)) + one.steps * sum(pair[1].bytes for pair in one.pairs)
    features = (log2(max(one.steps, 1)), log2(max(one.batch, 1)), log2(max(one.hidden, 1)))
    family = f"recurrent.{'fused.' if one.is_fused else ''}{one.pass_name}"
    passes = passes_to(call, moved, "hidden weights read at each time step")
    rate = chip.precision(one.data.dtype)
    return KernelWork(
        family, features, flop, rate, moved, one.launches, seconds, passes, at_once=max(seconds / waited, 1.0)
    )


def _fused_seconds(chip: Chip, one: Recurrence) -> float:
    """Return the time of the kernel of one layer and direction."""
    form = _form()["fused"][one.pass_name]
    padded = ceil(one.hidden / _PADDING) * _PADDING
    weights = one.gates // one.hidden * padded**2 / _REGISTERS
    even = form["start_even"] if padded == one.hidden else 0.0
    start = form["start"] + (form["start_weights"] + even) * weights
    step = form["step"] + form["step_weights"] * weights
    step += form["full"] * (weights >= 1)
    step *= form["half"] if one.kind == "half" else 1
    if one.mode == "RNN" and weights > 1:
        spilled = _form()["fused"]["spilled"]
        step += spilled["microseconds"] + spilled["beyond"] * (weights - 1)
        read = min(one.batch, chip.multiprocessors) * (weights - 1) * _REGISTERS * _REGISTER_BYTES
        step = max(step, read / (chip.bandwidth * spilled["bandwidth"]) * 1e6)
    else:
        step += form["beyond"] * max(weights - 1, 0) * (form["half"] if one.kind == "half" else 1)
    return float(ceil(one.batch / chip.multiprocessors) * (start + one.steps * step) * 1e-6)


def _kernels_at_once(chip: Chip, one: Recurrence) -> _AtOnce:
    """Return how many kernels run while a product does.

    Where the CPU takes longer to launch a time step than the GPU to compute it, layers follow each other, and of two
    directions only the gates of one run beside the product of the other.
    """
    form, both = _form()["at_once"], one.directions == 2
    product, gates = (seconds * 1e6 for seconds in _parts_of_step(chip, one, 1.0))
    alone = product + gates
    inputs = _inputs_of_a_step_seconds(chip, one) * 1e6
    most = 1 + (one.streams - 1) * alone / (alone + form["half_us"]) + form["most_inputs"] * inputs / (inputs + alone)
    launch_us = form["step_us"][one.pass_name][one.product_kind] * chip.host_pace ** form["pace_power"]
    launch_us *= 1 if both else form["following"]
    fewest = 1.0
    if both:
        share, half_us = form["most_both"]["split" if one.splits_depth else "whole"]
        most = 1 + share * product / (product + half_us)
        overlap = min(max(product - form["gates_share"] * launch_us, 0.0), gates)
        fewest = min(1 + overlap / product, most)
    middle, spread = form["behind"]["both" if both else "stack"]
    busy = alone
    if not both:
        busy += inputs
        middle *= (max(one.layers, 2) / 2) ** form["deeper"]
    behind = NormalDist(log(middle), spread).cdf(log(busy / launch_us))
    beside = (most - fewest) * behind
    return _AtOnce(fewest + beside, most, 1 + beside * form["inputs"]["both" if both else "stack"])


def _step_seconds(chip: Chip, one: Recurrence, at_a_time: float) -> float:
    """Return the time of one step while so many kernels run at a time: its product and its gates."""
    return sum(_parts_of_step(chip, one, at_a_time))


def _parts_of_step(chip: Chip, one: Recurrence, at_a_time: float) -> tuple[float, float]:
    """Return the time of the product of a step while so many kernels run at a time, and that of its gates."""
    columns, depth = (one.hidden, one.gates) if one.backward else (one.gates, one.hidden)
    step = RecurrentProduct(one.step_kind, one.pass_name, one.batch, columns, depth)
    product_seconds = recurrent_product_seconds(step, at_a_time, chip.multiprocessors)
    product_seconds = product_seconds * longer_than_measured(chip, "products") + longer_loading(chip, one, at_a_time)
    waiting = _form()["gates_waiting"]
    share, often, longer = waiting["both"] if one.directions == 2 else waiting[one.pass_name][one.width]
    tiles = ceil(one.batch / _TILE) * ceil(columns / _TILE)
    others = (at_a_time - 1) * tiles / chip.multiprocessors
    waited = product_seconds * share * often * others / (1 + often * others)
    return product_seconds, waited + _gates_seconds(chip, one) * (1 + longer * others)


def _gates_seconds(chip: Chip, one: Recurrence) -> float:
    """Return the time of the gates of one step, longer where what they read is no longer in the cache."""
    first, rest = _form()["gates"][one.mode][one.pass_name][one.width]
    longer, often = _form()["gates_cold"][one.pass_name]
    steps = one.steps * one.layers if one.backward else one.steps_at_a_time
    read = steps * one.batch * one.gates * one.data.itemsize * one.directions
    cold = min(often * read / chip.l2_bytes, 1)
    microseconds = (first + rest * one.batch * one.hidden * 1e-5) * (1 + longer * cold)
    return float(microseconds * 1e-6 * longer_than_measured(chip, "gates"))


def _inputs_seconds(chip: Chip, one: Recurrence, pair: tuple[Array, Array], beside: float) -> float:
    """Return the time of the products of a layer's inputs, in backward of their gradients."""
    gates, inputs = pair[0].shape
    rows = one.steps_at_a_time * one.batch
    columns, depth = (inputs, gates) if one.backward else (gates, inputs)
    if one.is_fused or one.is_odd(gates, inputs):
        of_data = one.parts * _product_seconds(chip, one, rows, columns, depth, (gates, inputs))
    else:
        part = RecurrentProduct(one.kind_of(gates, inputs), f"inputs {one.pass_name}", rows, columns, depth)
        of_part = recurrent_product_seconds(part, beside, chip.multiprocessors)
        of_data = one.parts * of_part * longer_than_measured(chip, "products")
    return of_data


def _inputs_of_a_step_seconds(chip: Chip, one: Recurrence) -> float:
    """Return what the products of the inputs of a layer of a stack take for each time step, which wait for them."""
    alone = sum(_inputs_seconds(chip, one, pair, 1.0) for pair in one.pairs)
    return alone / (len(one.pairs) * one.steps) if one.layers > 1 else 0.0


def _weights_seconds(chip: Chip, one: Recurrence) -> float:
    """Return the time of the gradients of all weights, sums over samples, computed last and beside each other.

    Those of the inputs are one product for each layer and direction; of the hidden states the first, which lie apart
    from those of the steps, are another.  Products of all layers, and the sums of biases, run at once, if the products
    take longer than their launches.
    """
    form = _form()["weights"]
    start, each = form[one.product_kind]
    seconds, products = 0.0, 0
    for of_inputs, of_hidden in one.pairs:
        gates, hidden = of_hidden.shape
        sizes = ((of_inputs.shape[1], one.steps), (hidden, one.steps - 1), (hidden, 1))
        for columns, steps in filter(lambda size: size[1], sizes):
            tiles = ceil(gates / _WEIGHTS_TILE) * ceil(columns / _WEIGHTS_TILE)
            seconds += start * 1e-6 + steps * one.batch * tiles / chip.multiprocessors * each * 1e-9
            products += 1
    launch_seconds = form["launch_us"] * chip.host_pace ** _form()["at_once"]["pace_power"] * 1e-6
    biases = _bias_seconds(chip, one) * len(one.pairs)
    longer = form["beside"] + form["beside_biases"] * biases / (biases + seconds)
    return float(seconds * (1 + longer * min(seconds / max(products, 1) / launch_seconds, 1) ** 2))


def _bias_seconds(chip: Chip, one: Recurrence) -> float:
    """Return the time of the gradient of one layer's biases: blocks of 32 columns add up row after row."""
    start, each, wide, most, longer, often = _form()["biases"][one.mode][one.width]
    columns, rows = min(one.hidden * min(one.streams, 2) / 1000, most), one.steps * one.batch
    cold = min(often * rows * one.gates * one.data.itemsize * len(one.pairs) / chip.l2_bytes, 1)
    seconds = start * 1e-6 + rows * (each + wide * columns) * (1 + longer * cold) * 1e-9
    return float(seconds * longer_than_measured(chip, "biases"))


def longer_than_measured(chip: Chip, kernels: str) -> float:
    """Return how many times as long as on the GPU of the constants kernels take, by the bandwidth of its memory."""
    power: float = _form()["memory"][kernels]
    return float((read_yaml("efficiency.yaml")["loading"]["bandwidth"] / chip.bandwidth) ** power)


def longer_loading(chip: Chip, one: Recurrence, at_a_time: float) -> float:
    """Return what a product of a time step takes longer than on the GPU of the constants to load weights from memory.

    Products that run at a time read all of their weights at each step, of which the cache keeps the less the more there
    are.  In backward those of 32 bits compute for longer than they load.
    """
    if one.backward and one.kind != "half":
        return 0.0
    read = at_a_time * one.pairs[0][1].elements * one.data.itemsize
    missed = read * min(read / chip.l2_bytes, 1)
    return float(missed * (1 / chip.bandwidth - 1 / read_yaml("efficiency.yaml")["loading"]["bandwidth"]))


def _dropout_seconds(one: Recurrence) -> float:
    """Return the time of dropout between layers: forward draws a mask and applies it, part by part, as backward does.

    Backward applies it once more, to the inputs of which the gradients of the weights are products.
    """
    form = _form()["dropout"]
    numbers = one.steps * one.batch * one.hidden
    start, each = form["generate" if not one.backward else "apply"]
    part_start, part_each = form["apply"]
    of_parts = one.parts * part_start + numbers * part_each * 1e-6
    return float(one.dropped * (start + numbers * each * 1e-6 + of_parts) * 1e-6)


def _product_seconds(chip: Chip, one: Recurrence, m: int, n: int, k: int, row: tuple[int, int]) -> float:
    """Return the time of a product of m x k with k x n alone; ``row``: numbers of a row of its factors in memory."""
    kind = "half_odd" if one.is_odd(*row) else one.kind_of(*row)
    return product(chip, kind, one.data.dtype, ProductSizes(1, m, n, k), "plain.nn").seconds


@cache
def _form() -> dict[str, Any]:
    form: dict[str, Any] = read_yaml("efficiency.yaml")["recurrent"]
    return form
