"""Kernels that go along a dimension step by step: cumulative sums and the like, and the loss of CTC.

Constants and their source: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import prod

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.indexing import sorted_values
from trainatomy.operators.cost.kernel import Chip, KernelWork, name_of, number
from trainatomy.results.operations import Call

_WHOLE_TARGETS = 450
"""``_ctc_loss_backward`` collects the gradients of each place by itself where time steps, targets and classes, weighted,
are fewer (``is_large`` in aten/src/ATen/native/cuda/LossCTC.cu)."""


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
    return work._replace(seconds=form["start_seconds"] + max(seconds, work.bytes / (chip.bandwidth * form["bandwidth"])))


def ctc(call: Call, chip: Chip) -> KernelWork:
    """Return the work of the loss of CTC, or of its gradient: threads for the places of a target take each time step.

    The gradient takes the steps back, and collects the gradients of classes.
    """
    backward = "backward" in call.name
    scores, targets = call.inputs[backward], call.inputs[1 + backward]
    steps, batch, classes = scores.shape
    longest = targets.shape[-1] if len(targets.shape) > 1 else targets.elements / batch
    form: dict[str, float] = read_yaml("efficiency.yaml")["ctc"]
    way = "backward" if backward else "forward"
    seconds = form["start_seconds"] + steps * (form[f"{way}_step"] + form[f"{way}_place"] * longest)
    if backward and 2 * steps + 24 * batch / 10 + 2 * classes / 10 <= _WHOLE_TARGETS:
        seconds += classes * form["class_seconds"]
    return memory_bound(f"ctc.{way}", chip, call, launches=26 if backward else 6)._replace(seconds=seconds)
