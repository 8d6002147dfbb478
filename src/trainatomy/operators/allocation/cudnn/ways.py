"""Ways in which cuDNN's library convolves groups of images, for the time of a call (``operators/cost/ways.py``)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from trainatomy.catalog.files import read_text
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.missing import missing_engine
from trainatomy.operators.cost.kernel import number, whole_numbers
from trainatomy.operators.cost.ways import ARGUMENT, FILE, FORWARD, INPUT, TOGETHER, WEIGHT

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan, Heuristics
    from trainatomy.results.operations import Call

_IMAGES = 4
"""Dimensions of a batch of images."""
_SPLIT, _UNDIVIDED, _FEW_PARTS = 0, 99, 3
"""``CUDNN_KNOB_TYPE_SPLIT_K``; its value where an engine has none; parts up to which a sum is shared by few blocks."""
_TRANSPOSED = {FORWARD: INPUT, INPUT: FORWARD}


def way_of(kind: Kind, one: Convolution, plan: EnginePlan) -> str | None:
    """Return how a plan convolves groups; None where no kernel of its engine was seen."""
    engines = _engines()[kind]
    if missing := missing_engine(kind, one, plan):
        return "turns" if missing in engines["missing turns"] else TOGETHER
    way = next((way for way, known in engines.items() if plan.engine in known), None)
    if way == "turns" and kind == WEIGHT and dict(plan.knobs).get(_SPLIT, _UNDIVIDED) <= _FEW_PARTS:
        return "unsplit"
    return way


def ways_of_call(call: Call, heuristics: Heuristics, *, tf32: bool, deterministic: bool) -> tuple[str, ...] | None:
    """Return the way of each product of a convolution; None where it has no groups of images or is not answered."""
    asked = convolutions_of(call)
    if asked is None:
        return None
    found = []
    for kind, one in asked:
        plan = heuristics.plan(kind, one, tf32=tf32, deterministic=deterministic)
        way = None if plan is None else way_of(kind, one, plan)
        if way is None:
            return None
        found.append(way)
    return tuple(found)


def say_ways(calls: list[Call], heuristics: Heuristics, *, tf32: bool, deterministic: bool) -> None:
    """Add to the convolutions among the calls of a step how their groups are convolved."""
    for index, call in enumerate(calls):
        ways = ways_of_call(call, heuristics, tf32=tf32, deterministic=deterministic)
        if ways is not None:
            calls[index] = call._replace(numbers=(*call.numbers, (ARGUMENT, ",".join(ways))))


def convolutions_of(call: Call) -> list[tuple[Kind, Convolution]] | None:
    """Return what a convolution of groups of images asks of cuDNN, in order; None for any other call."""
    groups = int(number(call, "groups", "1"))
    if not call.name.startswith("aten::convolution") or groups == 1:
        return None
    backward = "backward" in call.name
    out, x, weight = call.inputs[:3] if backward else (call.outputs[0], *call.inputs[:2])
    dtype = getattr(torch, x.dtype, torch.float64)
    if len(x.shape) < _IMAGES or weight.shape[1] == 1 or math.prod(weight.shape[2:]) == 1 or dtype == torch.float64:
        return None
    transposed = number(call, "transposed") == "True"
    last = any(tensor.strides[1] == 1 and tensor.shape[1] > 1 for tensor in (x, weight))
    space = len(x.shape) - 2

    def each(name: str, usual: int) -> Sequence[int]:
        given = whole_numbers(number(call, name)) or [usual]
        return given * space if len(given) == 1 else given

    data, output = (out, x) if transposed else (x, out)
    shapes = torch.Size(data.shape), torch.Size(weight.shape), torch.Size(output.shape)
    settings = each("stride", 1), each("padding", 0), each("dilation", 1)
    one = Convolution(*shapes, dtype, *settings, groups, transposed, last, 0)
    wanted = [part.strip(" []") == "True" for part in number(call, "output_mask", "[True, True]").split(",")]
    kinds = [kind for kind, wants in zip((INPUT, WEIGHT), wanted, strict=False) if wants] if backward else [FORWARD]
    swapped = [_TRANSPOSED.get(kind, kind) if transposed else kind for kind in kinds]
    return [(cast("Kind", kind), one) for kind in swapped]


@cache
def _engines() -> Any:
    return json.loads(read_text(FILE))["engines"]
