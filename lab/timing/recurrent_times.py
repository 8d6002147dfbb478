"""The GPU's own time of recurrent layers in a training, by how far the host is ahead when it launches them.

Behind other work cuDNN's kernels are queued and run beside each other, at any pace of the host, until the GPU has
caught up with the launches; then they run as the pace lets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trainatomy.catalog.machines import reference_host
from trainatomy.timing.cost_model import kernel_cost
from trainatomy.timing.host_costs import PARTS, cpu_costs
from trainatomy.timing.launch import seconds_within
from trainatomy.timing.step import RankStep, replayed

if TYPE_CHECKING:
    from trainatomy.results.operations import Call

RECURRENT = "_cudnn_rnn"
"""In the names of operators whose kernels slow each other the more the quicker the host launches them."""
QUICK = 1e-3
"""Pace of a host that launches all kernels at once."""
AT_PROFILED_FORWARD = 0.5
"""Share of profiled forward passes that may find the GPU at work: the first of two steps begins on an idle one."""


def recurrent_seconds(step: RankStep, pace: float) -> float:
    """Return the sum of the kernels of all recurrent layers of a step at a pace."""
    host, model, found = reference_host(), step.cost_model, 0.0
    costs = cpu_costs(host.microseconds, dict.fromkeys(PARTS, host.quiet), pace, host.recurrent_exponent)
    models = [replace(model, chip=model.chip._replace(host_pace=each), cache={}) for each in (pace, QUICK)]
    for call, ended, busy_until, took in _launched(step, pace):
        paced, queued = (kernel_cost(call, each).seconds for each in models)
        within = seconds_within(call, costs)
        behind = max(busy_until - (ended + costs.launch_delay - within), 0.0)
        share = min(behind / (within - took), 1.0) if within > took else float(behind > 0)
        share *= 1.0 if call.name.endswith("backward") else AT_PROFILED_FORWARD
        found += paced + (queued - paced) * share
    return found


def _launched(step: RankStep, pace: float) -> Iterator[tuple[Call, float, float, float]]:
    """Yield each recurrent call, when its launch ended, when all before it was done, and how long it took."""
    noted: list[tuple[int, float, float, float]] = []

    def note(index: int, launching: float, ended: float, began: float, took: float) -> None:
        noted.append((index, ended, began, took))

    replayed(step, pace=pace, on_launch=note)
    operations, busy_until = step.operations, 0.0
    for index, ended, began, took in noted:
        call = operations.calls[operations.operations[index].call]
        if RECURRENT in call.name:
            yield call, ended, busy_until, took
        busy_until = max(busy_until, began + took)
