"""Partial sums of kernels that divide sums among multiprocessors (stream-K), on Hopper.

A kernel of tensor cores computes its result in tiles. Where tiles do not fill the multiprocessors, several blocks share
one, and each keeps partial sums of a whole tile in fp32. Which tiles are shared follows CUTLASS
(include/cutlass/gemm/kernel/tile_scheduler_params.h, ``get_num_sk_tiles``): all of them if they fit at once, else those
of the last round if they are fewer than half of what fits. How many blocks fit at once is known to the driver only,
because a cluster of blocks must fit into one group of multiprocessors. Without a driver cuDNN answers as if 14 to 18
did; the partial sums in its answer are replaced here, not added to.

Read off what an H200 answered for 471 divided sums (cuDNN 9.19, benchmarks/cudnn/records/answers-h200.jsonl.gz): the
blocks at once by size of cluster, the tiles by knob, and the shortest sums that are divided. Cards of one kind may
differ in how their multiprocessors are grouped, and then fit other numbers of clusters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainatomy.operators.allocation.arguments import ceil_div, round_up
from trainatomy.operators.allocation.cudnn.heuristics import CLUSTER_KNOB
from trainatomy.operators.allocation.cudnn.weight_gradient import transformed

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

_ENGINES = (62, 65, 67, 68, 71)
"""Engines of tensor cores on Hopper that divide sums."""
_TILE_KNOB = 2
"""``CUDNN_KNOB_TYPE_TILE_SIZE``."""
_TILES = {
    0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256), 7: (64, 128), 9: (64, 256),
}  # fmt: skip
"""Rows and columns of tiles."""
_MEASURED_ON = 132
"""Multiprocessors of the H200 that was asked."""
_AT_ONCE = {1: 132, 2: 132, 3: 117, 4: 120, 5: 110, 6: 108, 7: 112, 8: 120}
"""Blocks that fit at once by size of cluster."""
_SHORTEST_WEIGHT = {torch.float32: 512, torch.float16: 1024, torch.bfloat16: 4096}
_SHORTEST_LAST = {torch.float32: 256, torch.float16: 256, torch.bfloat16: 2048}
_SHORTEST = {torch.float32: 256, torch.float16: 512, torch.bfloat16: 2048}
"""Terms of the shortest partial sums: of weight gradients, if all tiles are shared and if only the last are; of other
operations (eight steps of 128 bytes in fp32 and fp16, ``min_iters_per_sk_unit_``)."""
_SUM, _HEADER, _OF_PART = 4, 159, 4


def is_known(one: Convolution, plan: EnginePlan) -> bool:
    """Return whether the partial sums of a plan follow from its tiles.

    Unaligned channels-last tensors are not: some of them are copied.
    """
    if one.channels_last and (one.channels % one.fill or one.weight[0] % one.fill):
        return False
    known = plan.divides_sums and plan.engine in _ENGINES and dict(plan.knobs).get(_TILE_KNOB) in _TILES
    return known and one.groups == 1 and one.dtype in _SHORTEST


def missing_parts(kind: Kind, one: Convolution, plan: EnginePlan) -> int:
    """Return the bytes of partial sums that a GPU needs beyond the answer without a driver; negative: fewer."""
    knobs = dict(plan.knobs)
    tile = _TILES[knobs[_TILE_KNOB]]
    answered = plan.workspace - (0 if one.channels_last else transformed(one))
    if answered < 0:
        return 0
    parts = _parts(kind, one, tile, (knobs[CLUSTER_KNOB], knobs[CLUSTER_KNOB + 1]))
    needed = parts * (math.prod(tile) * _SUM + _OF_PART) + _HEADER if parts else min(answered, _HEADER)
    return needed - answered


def _parts(kind: Kind, one: Convolution, tile: tuple[int, int], cluster: tuple[int, int]) -> int:
    """Return the number of partial sums, each of one tile."""
    tiles, length = _tiles(kind, one, tile, cluster)
    fit = _at_once(one.multiprocessors, math.prod(cluster))
    whole = tiles <= fit
    shared = tiles if whole else tiles % fit
    if shared == 0 or (not whole and 2 * shared >= fit):
        return 0
    limits = _SHORTEST if kind != "weight gradient" else _SHORTEST_WEIGHT if whole else _SHORTEST_LAST
    each = min(fit // shared, length // limits[one.dtype])
    return each * shared if each > 1 else 0


def _tiles(kind: Kind, one: Convolution, tile: tuple[int, int], cluster: tuple[int, int]) -> tuple[int, int]:
    """Return the tiles of the result, in whole clusters, and the terms of each sum."""
    if kind == "weight gradient":  # the columns of each tap have tiles of their own
        rows, columns = ceil_div(one.weight[0], tile[0]), ceil_div(one.channels, tile[1]) * one.taps
        length = one.places
    else:
        result, between = (one.output, one.channels) if kind == "forward" else (one.data, one.weight[0])
        rows = ceil_div(result[0] * math.prod(result[2:]), tile[0])
        columns, length = ceil_div(result[1], tile[1]), between * one.taps
    return round_up(rows, cluster[0]) * round_up(columns, cluster[1]), length


def _at_once(multiprocessors: int, cluster: int) -> int:
    """Return the blocks that fit at once; on GPUs that were not asked, as if clusters filled them."""
    if multiprocessors == _MEASURED_ON and cluster in _AT_ONCE:
        return _AT_ONCE[cluster]
    return max(multiprocessors // cluster, 1) * cluster
