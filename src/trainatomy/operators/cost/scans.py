"""Kernels that go along a dimension step by step: cumulative sums and the like, the loss of CTC, weight norm.

Constants and their source: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, prod, sqrt

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.indexing import sorted_values
from trainatomy.operators.cost.kernel import Chip, KernelWork, name_of, number
from trainatomy.operators.cost.reduction import normalisation
from trainatomy.results.operations import Call

_WHOLE_TARGETS = 450
"""Time steps, samples and classes, weighted, from which on ``_ctc_loss_backward`` collects gradients by places
(``is_large`` in aten/src/ATen/native/cuda/LossCTC.cu)."""

_TILE, _THREADS = 16, 512
"""Numbers of the last dimension that a block of weight norm takes, and its threads."""


def scan(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a cumulative sum, product, extremum or logarithm of sums.

    Along the last dimension a block of threads takes rows; along others a thread takes a column and goes from one
    number to the next (``scan_dim`` in aten/src/ATen/native/cuda/ScanUtils.cuh).
    """
    source = call.inputs[0]
    if len(source.shape) < 2 or not source.elements:
        return sorted_values(call, chip)
    dim = int(number(call, "dim", "-1")) % len(source.shape)
    steps, beside = source.shape[dim], prod(source.shape[dim + 1 :])
    form: dict[str, float] = read_yaml("efficiency.yaml")["scan"]
    work = memory_bound(f"scan.{'rows' if beside == 1 else 'columns'}.{name_of(call)}", chip, call)
    if beside == 1:
        cycles = form["logarithm_cycles" if name_of(call) == "logcumsumexp" else "number_cycles"]
        seconds = source.elements * cycles / chip.issue_rate
    else:
        seconds = steps * form["step_seconds"]
    return work._replace(
        seconds=form["start_seconds"] + max(seconds, work.bytes / (chip.bandwidth * form["bandwidth"]))
    )


def ctc(call: Call, chip: Chip) -> KernelWork:
    """Return the work of the loss of CTC, or of its gradient: threads for the places of a target take each time step.

    The gradient takes the steps back, and then collects the gradients of classes: for each place along the time steps,
    or, of short sequences, for each time step along the places and the classes.
    """
    backward = "backward" in call.name
    scores, targets = call.inputs[backward], call.inputs[1 + backward]
    steps, batch, classes = scores.shape
    longest = targets.shape[-1] if len(targets.shape) > 1 else targets.elements / batch
    places = 2 * longest + 1
    form: dict[str, float] = read_yaml("efficiency.yaml")["ctc"]
    seconds = form["start_seconds"] + steps * (form["step_seconds"] + form["root_seconds"] * sqrt(places))
    if backward and 2 * steps + 24 * batch / 10 + 2 * classes / 10 > _WHOLE_TARGETS:
        seconds += steps * form["collected_step"] + form["passes"] * scores.bytes / chip.bandwidth
    elif backward:
        seconds += places * form["collected_place"] + classes * form["collected_class"]
    work = memory_bound(f"ctc.{'backward' if backward else 'forward'}", chip, call, launches=26 if backward else 6)
    return work._replace(seconds=seconds)


def weight_norm(call: Call, chip: Chip) -> KernelWork:
    """Return the work of weight norm, or of its gradient.

    Along the last dimension, as positional convolutions of wav2vec 2.0 have it, a block walks over all rows of 16
    numbers, however few blocks that are (aten/src/ATen/native/cuda/WeightNorm.cu, ``*_last_dim_kernel``).
    """
    weight = call.inputs[0]
    dim = int(number(call, "dim", "0")) % len(weight.shape)
    if dim == 0 or dim < len(weight.shape) - 1:
        return normalisation(call, chip)
    way, last = "backward" if "backward" in call.name else "forward", weight.shape[-1]
    form: dict[str, float] = read_yaml("efficiency.yaml")["weight_norm"]
    steps = ceil(weight.elements / last * _TILE / _THREADS) * ceil(ceil(last / _TILE) / chip.multiprocessors)
    seconds = form["start_seconds"] + steps * form[f"{way}_step"]
    return memory_bound(f"weight norm.{way}", chip, call)._replace(seconds=seconds)
