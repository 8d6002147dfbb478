"""Recurrent layers of cuDNN: what does not depend on the step before as one product, the rest step by step.

For each layer and direction, gates x hidden numbers from [inputs + hidden]: the inputs' product is one of [steps x
batch, inputs]; each step then needs a small product [batch, hidden] and a kernel for the gates, and waits for the step
before.  The two directions run side by side; layers follow each other by one step, unless a direction must have seen
the last step first.  Backward goes through the steps the other way; the weights' gradients are products over all steps.
Sources: Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs" (arXiv 1604.01946), which is
how cuDNN's standard algorithm works; aten/src/ATen/native/cudnn/RNN.cpp chooses that one unless it is told otherwise
(persistent kernels only for one layer in fp16).  No recurrent layer was timed to write this.
"""

from __future__ import annotations

from math import log2

from trainatomy.operators.cost.matmul import product
from trainatomy.operators.cost.work import HALVES, Chip, Work, number
from trainatomy.results.operations import Array, Call

_GATES_SECONDS = 2.0e-6
"""A small element-wise kernel between two products, with the gap behind it."""


def recurrent(call: Call, chip: Chip) -> Work:
    """``_cudnn_rnn`` (data, hidden states, weights...) and its backward (gradient, data, hidden states, weights...).

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
    at_once = sum(_at_once(chip, pair, steps * batch, backward) for pair in pairs)
    gates = pairs[0][1].shape[0]
    one = _product(chip, data, batch, hidden, gates) if backward else _product(chip, data, batch, gates, hidden)
    in_turn = steps * layers if directions == 2 else steps + layers - 1
    flop = 2.0 * steps * batch * sum(w.elements for pair in pairs for w in pair) * (2 if backward else 1)
    traffic = sum(t.bytes for t in (*call.inputs, *call.outputs)) + steps * sum(pair[1].bytes for pair in pairs)
    launches = 2 * steps * len(pairs) + 3 * len(pairs)
    seconds = at_once + in_turn * (one + _GATES_SECONDS)
    features = (log2(max(steps, 1)), log2(max(batch, 1)), log2(max(hidden, 1)))
    family = f"recurrent.{'backward' if backward else 'forward'}"
    return Work(family, features, flop, chip.precision(data.dtype), traffic, launches, seconds)


def _at_once(chip: Chip, pair: tuple[Array, Array], rows: int, backward: bool) -> float:
    """Products over all steps: of the inputs; backward of their gradient and of both weights'."""
    of_inputs, of_hidden = pair
    gates, inputs = of_inputs.shape
    if not backward:
        return _product(chip, of_inputs, rows, gates, inputs)
    weights = _product(chip, of_inputs, gates, inputs, rows) + _product(
        chip, of_inputs, gates, of_hidden.shape[1], rows
    )
    return weights + _product(chip, of_inputs, rows, inputs, gates)


def _product(chip: Chip, like: Array, m: int, n: int, k: int) -> float:
    kind = "half" if like.dtype in HALVES else "tf32" if chip.precision(like.dtype) == "tf32" else "fp32"
    return product(chip, kind, like.dtype, "nn", 1, m, n, k, "plain").seconds
