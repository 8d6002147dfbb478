"""Products (1x1 filters without strides or padding) on Hopper: does cuBLAS compute one, or a kernel of cuDNN.

The engines that hand a product to cuBLASLt are missing from an answer without a driver, so that it names the engine
that would come next. What is named tells which case it is: for each operation and type, some plans are only ever named
where cuBLAS would come first, and some only where it would not. The tables list those that were named in one case for
19 of 20 of the 1,288 different products that an H200 was asked for (cuDNN 9.19,
benchmarks/cudnn/records/answers-h200.jsonl.gz). Made from half of the products (by hash of their shapes, six times),
they and, where they say nothing, the rules were right about 96 % of the other half. A plan that random calls
contradict is left out, and rows (convolutions of one dimension) are not decided here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainatomy.operators.allocation.cudnn.heuristics import CLUSTER_KNOB
from trainatomy.operators.allocation.cudnn.ungrouped import product_bytes

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

_TILE_KNOB, _STAGES_KNOB = 2, 14
_SUM = 4
"""Bytes of a sum in fp32."""
_Named = tuple[int, int | None, tuple[int, int] | int | None]
"""An engine, its tile, and its cluster of blocks or, of engines without clusters, its stages."""

_BEFORE_IT_CUBLAS: dict[tuple[str, int], frozenset[_Named]] = {
    ("forward", 2): frozenset({
        (1, 4, None), (22, 1, 4), (22, 8, 4), (45, 0, 4), (45, 4, 3), (45, 5, 6), (47, 2, 0), (47, 15, 0),
        (62, 0, (1, 1)), (62, 0, (1, 2)), (62, 0, (2, 4)), (62, 0, (4, 2)), (62, 1, (2, 4)), (62, 1, (8, 1)),
        (62, 3, (1, 2)), (62, 5, (1, 4)),
    }),
    ("forward", 4): frozenset({
        (28, 4, None), (38, 0, 3), (38, 8, 4), (67, 0, (1, 2)), (67, 0, (8, 1)), (67, 3, (1, 2)), (67, 4, (4, 1)),
        (67, 5, (1, 2)), (67, 5, (1, 8)), (67, 5, (2, 1)), (67, 5, (7, 1)), (67, 7, (8, 1)), (70, 2, None),
        (70, 4, None), (70, 12, None),
    }),
    ("input gradient", 2): frozenset({
        (0, None, None), (1, 0, None), (40, 5, 3), (57, 0, 3), (57, 1, 5), (57, 4, 3), (57, 5, 4), (57, 7, 2),
        (57, 7, 5), (67, 0, (1, 2)), (67, 0, (1, 4)), (67, 0, (4, 2)), (67, 0, (4, 3)), (67, 0, (8, 1)),
        (67, 4, (1, 5)), (67, 4, (8, 1)), (67, 5, (1, 3)), (67, 5, (8, 1)), (67, 7, (1, 1)), (67, 7, (8, 1)),
        (67, 7, (8, 2)), (67, 9, (8, 1)), (67, 16, (7, 1)),
    }),
    ("input gradient", 4): frozenset({
        (58, 0, 4), (58, 4, 3), (71, 1, (5, 1)), (71, 4, (4, 1)), (74, 12, None), (76, 1, (2, 1)),
    }),
    ("weight gradient", 2): frozenset({
        (9, 8, 4), (9, 23, 3), (33, 1, 2), (33, 1, 5), (33, 4, 3), (49, 5, 4), (65, 1, (1, 3)), (65, 5, (1, 5)),
        (65, 5, (2, 3)), (65, 5, (2, 4)), (65, 5, (2, 7)),
    }),
    ("weight gradient", 4): frozenset({
        (34, 0, 4), (34, 7, 5), (40, 11, 0), (50, 5, 4), (68, 0, (1, 2)), (68, 4, (1, 2)), (68, 5, (1, 1)),
    }),
}  # fmt: skip
_FIRST: dict[tuple[str, int], frozenset[_Named]] = {
    ("forward", 2): frozenset({
        (62, 0, (1, 8)), (62, 1, (1, 8)), (62, 5, (2, 4)), (62, 6, (1, 2)), (62, 18, (5, 1)),
    }),
    ("forward", 4): frozenset({
        (67, 1, (8, 1)), (67, 9, (4, 1)), (67, 19, (2, 1)),
    }),
    ("input gradient", 2): frozenset({
        (67, 7, (4, 2)),
    }),
    ("input gradient", 4): frozenset({
        (76, 1, (2, 2)),
    }),
    ("weight gradient", 2): frozenset({
        (9, 7, 4), (65, 0, (1, 2)), (65, 0, (4, 2)), (65, 0, (8, 1)), (65, 1, (1, 5)), (65, 1, (1, 8)),
        (65, 1, (2, 1)), (65, 5, (1, 8)),
    }),
}  # fmt: skip


def runs_in_cublas(kind: Kind, one: Convolution, plan: EnginePlan) -> bool | None:
    """Return whether cuBLAS computes a product of images, by the plan that is named in its place; None: not known."""
    if not one.is_plain_product or one.groups > 1 or one.channels_last or len(one.data) != 4:
        return None
    if one.data[2] == 1:
        return None
    knobs = dict(plan.knobs)
    blocks = (knobs[CLUSTER_KNOB], knobs[CLUSTER_KNOB + 1]) if CLUSTER_KNOB in knobs else knobs.get(_STAGES_KNOB)
    named, of = (plan.engine, knobs.get(_TILE_KNOB), blocks), (kind, one.itemsize)
    if named in _BEFORE_IT_CUBLAS[of]:
        return True
    return False if named in _FIRST.get(of, ()) else None


def bytes_in_cublas(kind: Kind, one: Convolution) -> int:
    """Return the workspace of a product in cuBLAS; a weight gradient has fp32 sums of each image."""
    if kind == "weight gradient":
        return one.data[0] * math.prod(one.weight) * _SUM
    return product_bytes(one)
