"""How cuDNN's library computes convolutions, for the time of a call: its plans, and the ways of groups of images.

``operators/cost/plans.py`` and ``operators/cost/algorithms.py`` say what follows from them.
"""

from __future__ import annotations

import json
import math
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from trainatomy.catalog.files import read_text
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.copies import is_cudnn_depthwise
from trainatomy.operators.allocation.cudnn.missing import missing_engine
from trainatomy.operators.cost import plans
from trainatomy.operators.cost.algorithms import ARGUMENT, FILE, FORWARD, INPUT, TOGETHER, WEIGHT
from trainatomy.operators.cost.kernel import geometry_of, number, wanted_gradients
from trainatomy.operators.cost.plans import Plan

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan, Heuristics
    from trainatomy.results.operations import Call

_IMAGES = 4
"""Dimensions of a batch of images."""
_SPLIT, _UNDIVIDED, _FEW_PARTS = 0, 99, 3
"""``CUDNN_KNOB_TYPE_SPLIT_K``; its value where an engine has none; parts up to which a sum is shared by few blocks."""
_SIZED = (_SPLIT, 12, 17, 25)
"""Knobs that follow from the sizes of a call: parts of a sum, where they are kept, the workspace."""
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


def plan_of(kind: Kind, one: Convolution, plan: EnginePlan) -> Plan:
    """Return a plan as calls say it; an engine that only a GPU's driver offers has a negative number."""
    knobs, missing = dict(plan.knobs), missing_engine(kind, one, plan)
    others = ",".join(f"{knob}={value}" for knob, value in plan.knobs if knob not in _SIZED)
    setting = f"{zlib.crc32(others.encode()) % 4096:03x}" if others else ""
    return Plan(-missing if missing else plan.engine, setting, max(knobs.get(_SPLIT, 1), 1))


def say_plans(
    calls: list[Call], heuristics: Heuristics, capability: tuple[int, int], *, tf32: bool, deterministic: bool
) -> None:
    """Add to the convolutions among the calls of a step by which plans, and in which ways, they are computed.

    Plans are said where the calibrations name the same engines.

    Args:
        calls: The calls of a step, which are replaced.
        heuristics: cuDNN's heuristics for a GPU.
        capability: The GPU's compute capability.
        tf32: Whether fp32 may use tensor cores.
        deterministic: Whether engines whose results differ from run to run are left out.
    """
    named = plans.names_engines(heuristics.version, capability)
    for index, call in enumerate(calls):
        asked = convolutions_of(call)
        chosen = [heuristics.plan(kind, one, tf32=tf32, deterministic=deterministic) for kind, one in asked]
        found = [(*one, plan) for one, plan in zip(asked, chosen, strict=True) if plan is not None]
        if not found or len(found) < len(chosen):
            continue
        said = []
        ways = [way for each in found if (way := way_of(*each)) is not None] if _has_groups_of_images(call) else []
        if len(ways) == len(found):
            said.append((ARGUMENT, ",".join(ways)))
        if named:
            said.append((plans.ARGUMENT, plans.say([plan_of(*each) for each in found])))
        calls[index] = call._replace(numbers=(*call.numbers, *said))


def _has_groups_of_images(call: Call) -> bool:
    """Return whether a convolution has groups of several channels, and its weight several places."""
    weight = call.inputs[2 if "backward" in call.name else 1].shape
    return int(number(call, "groups", "1")) > 1 < weight[1] and len(weight) >= _IMAGES and math.prod(weight[2:]) > 1


def convolutions_of(call: Call) -> list[tuple[Kind, Convolution]]:
    """Return what a convolution asks of cuDNN, in order; nothing for any other call.

    Nothing either for fp64, and for depthwise convolutions that PyTorch's own kernels compute.  PyTorch hands
    sequences to cuDNN as images of one row (``aten/src/ATen/native/Convolution.cpp``, ``view4d``).
    """
    if not call.name.startswith("aten::convolution"):
        return []
    backward = "backward" in call.name
    out, x, weight = call.inputs[:3] if backward else (call.outputs[0], *call.inputs[:2])
    dtype = getattr(torch, x.dtype, torch.float64)
    if len(x.shape) < _IMAGES - 1 or dtype == torch.float64:
        return []
    transposed = number(call, "transposed") == "True"
    last = any(tensor.strides[1] == 1 and tensor.shape[1] > 1 for tensor in (x, weight)) and len(x.shape) >= _IMAGES
    space = len(x.shape) - 2
    rows = int(space == 1)
    data, output = (out, x) if transposed else (x, out)
    shapes = [torch.Size((*tensor.shape[:2], *[1] * rows, *tensor.shape[2:])) for tensor in (data, weight, output)]
    stride, padding, dilation = geometry_of(call, space)
    settings = (1,) * rows + stride, (0,) * rows + padding, (1,) * rows + dilation
    groups = int(number(call, "groups", "1"))
    one = Convolution(shapes[0], shapes[1], shapes[2], dtype, *settings, groups, transposed, last, 0)
    is_depthwise = 1 < groups == data.shape[1]
    if is_depthwise and not (last or transposed or is_cudnn_depthwise(one)):
        return []
    wanted = zip((INPUT, WEIGHT), wanted_gradients(call), strict=False)
    kinds = [kind for kind, wants in wanted if wants] if backward else [FORWARD]
    swapped = [_TRANSPOSED.get(kind, kind) if transposed else kind for kind in kinds]
    return [(cast("Kind", kind), one) for kind in swapped]


@cache
def _engines() -> Any:
    return json.loads(read_text(FILE))["engines"]
