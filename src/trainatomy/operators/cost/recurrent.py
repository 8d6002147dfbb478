"""Recurrent layers of cuDNN: one product for all that does not depend on the previous time step, the rest step by step.

Each layer and direction computes gates x hidden numbers from [inputs + hidden]. The inputs' part is one product of
[steps x batch, inputs]; each step then needs a small product [batch, hidden] and a kernel for the gates, and waits for
the previous step. The two directions run side by side; a layer runs one step behind the layer below, unless a direction
must have seen the last step first. Backward goes through the steps in reverse; the gradients of the weights are
products over all steps.

Sources: Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs" (arXiv 1604.01946), which is
how cuDNN's standard algorithm works; aten/src/ATen/native/cudnn/RNN.cpp chooses that one by default
(persistent kernels only for one layer in fp16). Kernels of five networks on an H200 or an H100 (LSTM, GRU and plain
ones, fp32 and fp16), by the profiler: directions and layers run on streams of cuDNN's own, and the product of a time
step does not split its depth, so that it takes as long as one multiprocessor needs for the depth.
"""

from __future__ import annotations

from math import log2

from trainatomy.operators.cost.kernel import HALVES, Chip, KernelWork, number, passes_to
from trainatomy.operators.cost.matmul import constants_of, product
from trainatomy.results.operations import Array, Call

_GATES_SECONDS = {"LSTM": (2.4e-6, 2.7e-6), "GRU": (2.1e-6, 4.2e-6), "RNN": (1.6e-6, 2.4e-6)}
"""Duration of the elementwise kernels between two products, forward and backward; GRUs have two of them in backward."""
_STEP_SECONDS = {
    "half": (2.0e-6, 1.7e-9),
    "tf32": (2.3e-6, 5.6e-9),
    "tf32 backward": (5.3e-6, 3.7e-9),
    "misaligned": (2.0e-6, 1.5e-8),
    "fp32": (2.0e-6, 1.5e-8),
}
"""Time of a step's product: its start, and for each number of its depth; that of fp32 without TF32 is assumed."""


def recurrent(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``_cudnn_rnn`` (data, states, weights) or its backward (gradient, data, states, weights).

    Weights are pairs [gates x hidden, inputs] and [gates x hidden, hidden], layer by layer, directions side by side.
    """
    backward = call.name.endswith("backward")
    data, state = call.inputs[1:3] if backward else call.inputs[:2]
    weights = [tensor for tensor in call.inputs if len(tensor.shape) == 2]
    directions = 2 if number(call, "bidirectional") == "True" else 1
    pairs = list(zip(weights[::2], weights[1::2], strict=False))
    batch, hidden = state.shape[-2:]
    steps = data.elements // max(batch * data.shape[-1], 1)
    layers = max(len(pairs) // directions, 1)
    chip = chip._replace(tf32=chip.cudnn_tf32)
    parallel = sum(_parallel_seconds(chip, pair, steps, batch, backward) for pair in pairs)
    gates = pairs[0][1].shape[0]
    columns, depth = (hidden, gates) if backward else (gates, hidden)
    between = _GATES_SECONDS.get(number(call, "mode"), _GATES_SECONDS["RNN"])[backward]
    step = _step_seconds(chip, data, batch, columns, depth, hidden, backward) + between
    serial_steps = steps * layers if directions == 2 else steps + layers - 1
    flop = 2.0 * steps * batch * sum(w.elements for pair in pairs for w in pair) * (2 if backward else 1)
    moved = sum(t.bytes for t in (*call.inputs, *call.outputs)) + steps * sum(pair[1].bytes for pair in pairs)
    by_step = sum(_is_misaligned(chip, one, one.shape[1]) for one, _ in pairs)
    launches = 2 * steps * len(pairs) + 3 * len(pairs) + steps * by_step
    seconds, waited = parallel + steps * len(pairs) * step, parallel + serial_steps * step
    features = (log2(max(steps, 1)), log2(max(batch, 1)), log2(max(hidden, 1)))
    family = f"recurrent.{'backward' if backward else 'forward'}"
    passes = passes_to(call, moved, "hidden weights read at each time step")
    rate, at_once = chip.precision(data.dtype), max(seconds / waited, 1.0)
    return KernelWork(family, features, flop, rate, moved, launches, seconds, passes, at_once)


def _step_seconds(chip: Chip, data: Array, batch: int, columns: int, depth: int, hidden: int, backward: bool) -> float:
    """Return the time of one step's product, which one multiprocessor computes for each tile."""
    kind = name = _kind(chip, data)
    if _is_misaligned(chip, data, hidden):
        name = "misaligned"
    elif kind == "tf32" and backward:
        name = "tf32 backward"
    start, each = _STEP_SECONDS[name]
    working = _product_seconds(chip, data, batch, columns, depth) - constants_of(kind).start_seconds
    return start + max(working, depth * each)


def _parallel_seconds(chip: Chip, pair: tuple[Array, Array], steps: int, batch: int, backward: bool) -> float:
    """Return the time of products over all steps: of the inputs; in backward of their gradient and of both weights'.

    The inputs' product, and that of their gradient, is computed step by step where rows are not aligned.
    """
    of_inputs, of_hidden = pair
    (gates, inputs), hidden = of_inputs.shape, of_hidden.shape[1]
    times, rows = (steps, batch) if _is_misaligned(chip, of_inputs, inputs) else (1, steps * batch)
    if not backward:
        return times * _product_seconds(chip, of_inputs, rows, gates, inputs)
    weights = sum(_product_seconds(chip, of_inputs, gates, columns, steps * batch) for columns in (inputs, hidden))
    return weights + times * _product_seconds(chip, of_inputs, rows, inputs, gates)


def _is_misaligned(chip: Chip, like: Array, columns: int) -> bool:
    """Return whether rows of numbers that tensor cores multiply as TF32 do not begin at multiples of 16 bytes."""
    return bool(columns * like.itemsize % 16) and _kind(chip, like) == "tf32"


def _product_seconds(chip: Chip, like: Array, m: int, n: int, k: int) -> float:
    kind = _kind(chip, like)
    kind = "tf32_misaligned" if any(_is_misaligned(chip, like, size) for size in (n, k)) else kind
    return product(chip, kind, like.dtype, "nn", 1, m, n, k, "plain").seconds


def _kind(chip: Chip, like: Array) -> str:
    return "half" if like.dtype in HALVES else "tf32" if chip.precision(like.dtype) == "tf32" else "fp32"
