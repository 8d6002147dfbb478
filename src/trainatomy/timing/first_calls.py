"""The cost to the host of an operator's first call with new shapes; the costs are in ``catalog/first_calls.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost import depthwise
from trainatomy.operators.cost.kernel import HALVES, number
from trainatomy.results.operations import Call

_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Names of convolutions, and the place of the input among their tensors; the weight follows it."""
_ATTENTION = "aten::_scaled_dot_product_cudnn_attention"


class _Plan(NamedTuple):
    """A call whose first one with these shapes makes cuDNN plan it: its cost's name, and what plans are kept for."""

    cost: str
    name: str
    shapes: object
    numbers: object


def first_call_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return the seconds that calls take longer when their shapes have not occurred, except in the calls ``before``.

    cuDNN keeps a plan for each shape, order in memory and setting: attention forward with the sums that backward needs
    and without them are two plans (``MHAParams`` in aten/src/ATen/native/cudnn/MHA.cpp), a convolution forward is one.
    """
    known = _known()
    return sum(known[plan.cost] for plan in _plans(calls) - _plans(before))


def first_evaluation_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return the seconds that the first evaluation of a process takes longer, by its calls and those of the step."""
    return _known()["first_evaluation"] + first_call_seconds(calls, before)


def first_on_machine_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return what a first evaluation takes even longer on a machine on which no process has run one."""
    compiles = any(plan.name == _ATTENTION for plan in _plans(calls) - _plans(before))
    return _known()["first_on_machine"] if compiles else 0.0


def _plans(calls: Iterable[Call]) -> set[_Plan]:
    return {
        _Plan(cost, call.name, tuple((array.shape, array.strides) for array in call.inputs), call.numbers)
        for call in calls
        if (cost := _cost_of(call))
    }


def _cost_of(call: Call) -> str:
    """Return the name of what planning a call costs; empty if cuDNN does not run it."""
    place = _CONVOLUTIONS.get(call.name)
    if place is None:
        return call.name if call.name in _known() else ""
    x, weight = call.inputs[place : place + 2]
    if x.on_host:
        return ""
    if int(number(call, "groups", "1")) == 1 or weight.shape[1] > 1:
        return call.name
    if depthwise.kind_of(call, x, weight) == "own":
        return ""
    return f"{call.name} depthwise" if x.dtype in HALVES else call.name


def _known() -> dict[str, float]:
    return cast("dict[str, float]", read_yaml("first_calls.yaml"))
