"""Workspaces of plans that cuDNN's library names only on a GPU, and which ``cudnn.benchmark`` tries there.

Engines for FFT and Winograd's method in fp32 are slow beside tensor cores, so that the heuristics rank them low, but
their workspaces are by far the largest. The sizes follow from the methods: each image and each filter of the
transformed tensors takes a plane of complex numbers, or all tiles of it. The last plan of each list is compiled when it
is made, and works on copies in channels-last layout.

Read off the plans that an H200's handle offered (cuDNN 9.19; lab/records/cudnn); assumed for other GPUs.

Partial sums of kernels that divide sums among multiprocessors (stream-K), on Hopper.

A kernel of tensor cores computes its result in tiles. Where tiles do not fill the multiprocessors, several blocks share
one, and each keeps partial sums of a whole tile in fp32. Which tiles are shared follows CUTLASS
(include/cutlass/gemm/kernel/tile_scheduler_params.h, ``get_num_sk_tiles``): all of them if they fit at once, else those
of the last round if they are at most half of what fits. How many blocks fit at once is known to the driver only,
because a cluster of blocks must fit into one group of multiprocessors. Without a driver cuDNN answers as if 14 to 18
did; the partial sums in its answer are replaced here, not added to.

How many blocks share a tile is what takes the least time: more of them each add up fewer terms, but their sums are then
added pair by pair, as a tree, of which each level takes as long as a few steps of the sum. More than eight blocks are
chosen by the terms that are left for each.

Read off what an H200 answered for 8,600 divided sums (cuDNN 9.19; lab/records/cudnn): the blocks at once by size
of cluster, the tiles by knob, and the steps of a level. They give the number of blocks for 97.9 % of these sums; where
all tiles are shared, for 99.4 %. An H100 fits the same numbers of blocks, but a level takes longer there
(``catalog/cudnn.yaml``): with factors for it, 1,465 of its 1,487 sums that may be divided are met, without
them 1,424. Cards of one kind may differ in how their multiprocessors are grouped, and then fit other numbers of
clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainatomy.allocator.blocks import round_up
from trainatomy.operators.allocation.cudnn.copies import copies, padded_width
from trainatomy.operators.allocation.cudnn.heuristics import CLUSTER_KNOB, EnginePlan
from trainatomy.operators.allocation.plan import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind


_ENGINES = (62, 65, 67, 68, 71)
"""Engines of tensor cores on Hopper that divide sums."""
_TILE_KNOB = 2
"""``CUDNN_KNOB_TYPE_TILE_SIZE``."""
_TILES = {
    0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256), 7: (64, 128), 9: (64, 256),
    16: (256, 32), 18: (64, 192), 20: (256, 96),
}  # fmt: skip
"""Rows and columns of tiles."""
_MEASURED_ON = 132
"""Multiprocessors of the H200 that was asked."""
_AT_ONCE = {1: 132, 2: 132, 3: 117, 4: 120, 5: 110, 6: 102, 7: 105, 8: 120, 12: 84, 16: 112}
"""Blocks that fit at once by size of cluster."""
_NARROWEST = 64
"""Channels of the narrowest tile, to which groups are merged."""
_STEP_BYTES = 128
"""Bytes of one row that a step of a sum reads."""
_LEVELS = {
    torch.float32: {
        (128, 128): (13.4, 5.4), (128, 64): (16.4, 7.4), (256, 128): (10.9, 3.0), (256, 64): (16.4, 7.4),
        (64, 128): (16.4, 7.4), (64, 256): (14.6, 4.9), (64, 64): (24.0, 9.5), (128, 256): (10.9, 3.0),
    },
    torch.float16: {
        (128, 128): (6.4, 2.4), (128, 64): (8.4, 3.3), (256, 128): (5.75, 2.3), (256, 64): (6.4, 2.4),
        (64, 128): (8.4, 3.4), (64, 256): (10.75, 6.8), (64, 64): (12.4, 4.4), (128, 256): (5.75, 2.3),
        (256, 32): (6.4, 2.4), (64, 192): (6.4, 2.4), (256, 96): (6.4, 2.4),
    },
    torch.bfloat16: {
        (128, 128): (54.0, 24.5), (128, 64): (67.0, 29.5), (256, 128): (44.0, 23.0), (256, 64): (52.0, 24.5),
        (64, 128): (63.0, 27.4), (64, 256): (63.0, 27.4), (64, 64): (99.8, 40.0), (128, 256): (31.0, 18.4),
    },
}  # fmt: skip
"""Steps that a level of the tree takes, by type and tile: if all tiles are shared, and if only the last are."""
_MOST_IN_TREE, _MOST_OF_TILE = 8, 128
"""Blocks of a tile that are chosen by time; blocks that share a tile at most."""
_FEWEST_STEPS = {torch.float32: (33, 33), torch.float16: (17, 17), torch.bfloat16: (17, 17)}
_FEWEST_STEPS_OF_LAST = {torch.float32: (8, 4), torch.float16: (8, 4), torch.bfloat16: None}
"""Steps for each of nine blocks, from which more than eight share a tile; the fewest that each of them then has."""
_MOST_ROUNDS = {(torch.float16, (128, 64)): 6}
"""Rounds of tiles after which the last ones are not shared: seen in 40 input gradients."""
_SUM, _HEADER, _UNSHARED, _OF_ROUNDS = 4, 159, 131, 4
"""Bytes: of a sum or a counter; of a workspace with partial sums; of one without, and added to one with them, if there
are more than two rounds of tiles."""


def _is_known(one: Convolution, plan: EnginePlan) -> bool:
    """Return whether the partial sums of a plan follow from its tiles.

    Unaligned channels-last tensors are not: some of them are copied.
    """
    if one.channels_last and (one.channels % one.fill or one.weight[0] % one.fill):
        return False
    tile = _TILES.get(dict(plan.knobs).get(_TILE_KNOB, -1))
    known = plan.divides_sums and plan.engine in _ENGINES and tile is not None and has_tiles(one, tile)
    return known and not (one.groups > 1 and (one.channels_last or one.transposed))


def has_tiles(one: Convolution, tile: tuple[int, int]) -> bool:
    """Return whether it is known how sums of such tiles are divided for the type of a convolution."""
    return tile in _LEVELS.get(one.dtype, ())


def missing_parts(kind: Kind, one: Convolution, plan: EnginePlan) -> int:
    """Return the bytes of partial sums that a GPU needs beyond the answer without a driver; negative: fewer.

    0 where the tiles of the plan are not known.
    """
    if not _is_known(one, plan):
        return 0
    knobs = dict(plan.knobs)
    answered = plan.workspace - copies(one)
    if answered < 0:
        return 0
    tile, cluster = _TILES[knobs[_TILE_KNOB]], (knobs[CLUSTER_KNOB], knobs[CLUSTER_KNOB + 1])
    tiles, length = tiles_and_terms(kind, one, tile, cluster)
    return divided_bytes(tiles, length, one, tile, math.prod(cluster)) - answered


def divided_bytes(tiles: int, length: int, one: Convolution, tile: tuple[int, int], cluster: int) -> int:
    """Return the bytes of partial sums and of their counters.

    Args:
        tiles: Tiles of the result.
        length: Terms of each sum.
        one: The convolution.
        tile: Rows and columns of a tile.
        cluster: Blocks of a cluster.
    """
    fit = _at_once(one.multiprocessors, cluster)
    whole, has_rounds = tiles <= fit, tiles > 2 * fit
    shared = tiles if whole else tiles % fit
    is_late = tiles // fit > _MOST_ROUNDS.get((one.dtype, tile), tiles)
    blocks = 1
    if shared and (whole or (2 * shared <= fit and not is_late)):
        steps = ceil_div(length * one.itemsize, _STEP_BYTES)
        factor = one.level_factors.get("all" if whole else str(one.dtype).removeprefix("torch."), 1.0)
        blocks = blocks_of_tile(steps, min(fit // shared, _MOST_OF_TILE), one.dtype, tile, factor, whole=whole)
    if blocks == 1:
        return _UNSHARED if has_rounds else 0
    sums = blocks * math.prod(tile) + _counters(blocks)
    return shared * sums * _SUM + _HEADER + (_OF_ROUNDS if has_rounds else 0)


def blocks_of_tile(
    steps: int, most: int, dtype: torch.dtype, tile: tuple[int, int], factor: float = 1.0, *, whole: bool
) -> int:
    """Return how many blocks share a tile, of at most ``most``; ``factor``: of the time of a level, to an H200's."""
    limits = (_FEWEST_STEPS if whole else _FEWEST_STEPS_OF_LAST)[dtype]
    if limits and most > _MOST_IN_TREE and steps // limits[0] > _MOST_IN_TREE:
        blocks = min(steps // limits[1], most)
        return blocks if blocks < most else ceil_div(steps, ceil_div(steps, most))
    level = factor * _LEVELS[dtype][tile][0 if whole else 1]

    def time(blocks: int) -> float:
        return ceil_div(steps, blocks) + level * (blocks - 1).bit_length()

    return min(range(1, max(2, min(most, steps) + 1)), key=time)


def _counters(blocks: int) -> int:
    """Return the counters of a tile, one for each pair on each level of the tree."""
    count = 0
    while blocks > 1:
        blocks = ceil_div(blocks, 2)
        count += blocks
    return count


def tiles_and_terms(kind: Kind, one: Convolution, tile: tuple[int, int], cluster: tuple[int, int]) -> tuple[int, int]:
    """Return the tiles of the result, in whole clusters, and the terms of each sum.

    Groups are padded, and those narrower than a tile are merged.
    """
    times, inside, outside = 1, one.channels, one.weight[0]
    if one.groups > 1:
        inside = outside = max(padded_width(one), _NARROWEST)
        times = ceil_div(one.groups * padded_width(one), inside)
    if kind == "weight gradient":  # the columns of each tap have tiles of their own
        rows, columns = ceil_div(outside, tile[0]), ceil_div(inside, tile[1]) * one.taps
        length = one.places
    else:
        result, between = (one.output, inside) if kind == "forward" else (one.data, outside)
        rows = ceil_div(result[0] * math.prod(result[2:]), tile[0])
        columns, length = ceil_div(outside if kind == "forward" else inside, tile[1]), between * one.taps
    return times * round_up(rows, cluster[0]) * round_up(columns, cluster[1]), length


def _at_once(multiprocessors: int, cluster: int) -> int:
    """Return the blocks that fit at once; on GPUs that were not asked, as if clusters filled them."""
    if multiprocessors == _MEASURED_ON and cluster in _AT_ONCE:
        return _AT_ONCE[cluster]
    return max(multiprocessors // cluster, 1) * cluster


_COMPLEX, _REAL = 8, 4
"""Bytes of a number in fp32."""
_SMALLEST, _LARGEST, _TILE = 16, 256, 32
"""Rows of the smallest and the largest FFT of a whole image, and of one of tiles."""
_GROUPS_AT_ONCE, _SMALLEST_OF_TILES = 8, 3
"""Groups that are transformed at once, and rows of the smallest filter of an FFT of tiles."""
_WINOGRAD_TILE, _WINOGRAD_ROWS = 4, 6
"""Rows of a tile of the result and of its transform, for filters of 3 x 3."""
WINOGRAD_IMAGES = 16
"""Images that Winograd's method in 16 bits fills up to, of forward and of the input gradient."""
_BESIDE = {2: {56, 76}}
"""Engines that cuDNN names for an input gradient where it also names an FFT, by the stride."""
_BESIDE_OF_OTHERS = {56}
_COPY_HEADER, _ALIGNED, _OF_COPY = 16, 64, 128
"""Bytes: added to a workspace with copies in another layout, alignment of buffers, added to a copy."""


@dataclass(frozen=True, slots=True)
class _Planes:
    """Images and filters that are transformed at once: those of at most eight groups."""

    filters: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, one: Convolution, channels: int | None = None, images: int | None = None) -> _Planes:
        """Count them; ``channels`` of the input of one group and ``images``, if not the convolution's own."""
        at_once = min(one.groups, _GROUPS_AT_ONCE)
        channels, outside = channels or one.channels, one.weight[0] // one.groups
        images = (images or one.data[0]) * at_once
        return cls(channels * outside * at_once, images * channels, images * outside)


def unnamed_workspaces(
    kind: Kind, one: Convolution, named: Sequence[EnginePlan], *, tf32: bool = True
) -> tuple[int, ...]:
    """Return the workspaces of the plans that cuDNN's library names on a GPU only, where it may name them.

    Whether it does is up to its heuristics, which leave out what they find slow. On an H200 they named an FFT for 81 of
    100 forward passes, 172 of 197 weight gradients and 87 of 94 input gradients without strides; with a stride of 2,
    for all 22 input gradients where they also named certain other engines (``named``) and for one of 10 others.

    Args:
        kind: The operation.
        one: The convolution.
        named: What the library names without a GPU; empty where it is not installed.
        tf32: Whether tensor cores may compute in fp32, as the plan that is compiled does.
    """
    sizes = [_generated(one)] if tf32 or one.dtype != torch.float32 else []
    beside = _BESIDE.get(max(one.strides), _BESIDE_OF_OTHERS)
    unfolds = not named or beside <= {plan.engine for plan in named if not plan.last}
    if one.dtype == torch.float32 and len(one.data) == 4 and max(one.dilation) == 1:
        if kind != "input gradient":
            sizes.append(of_whole_images(kind, one))
        elif unfolds or max(one.strides) == 1:
            sizes.append(by_tiles(one))
        if kind == "weight gradient":
            sizes.append(winograd(kind, one))
    return tuple(size for size in sizes if size)


def _generated(one: Convolution) -> int:
    """Return the workspace of the engine that is compiled when its plan is made: copies in channels-last layout."""
    if one.channels_last:
        return 0
    copied = [shape for shape in (one.data, one.weight, one.output) if math.prod(shape[2:]) > 1]
    return sum(math.prod(shape) * one.itemsize + _OF_COPY for shape in copied)


def of_whole_images(kind: Kind, one: Convolution) -> int:
    """Return the workspace of an FFT of padded images, 0 where there is none."""
    rows = max(places + 2 * padding for places, padding in zip(one.data[2:], one.padding, strict=True))
    size = max(_SMALLEST, 1 << (rows - 1).bit_length())
    if max(one.strides) > 1 or size > _LARGEST:
        return 0
    planes = _Planes.of(one)
    if kind == "forward":
        buffers, plain = max(planes.filters + planes.inputs, planes.outputs), planes.filters * one.taps
    else:
        buffers, plain = max(planes.filters, planes.inputs + planes.outputs), planes.outputs * math.prod(one.output[2:])
    return 2 * buffers * _plane(size) + round_up(plain * _REAL, _ALIGNED) + _copies(one, planes)


def by_tiles(one: Convolution) -> int:
    """Return the workspace of an FFT of tiles for the input gradient, 0 where there is none.

    Two rows of tiles are in work at once. With strides, the pixels between two steps become channels.
    """
    if one.weight[2] != one.weight[3] or one.weight[2] < _SMALLEST_OF_TILES or min(one.data[2:]) == 1:
        return 0
    folds = [_folded(one, dimension) for dimension in range(len(one.strides))]
    if all(fold.taps == 1 for fold in folds):  # a product of patches
        return 0
    strided = max(one.strides) > 1
    planes = _Planes.of(one, _unfolded_channels(one) if strided else None)
    at_once = 1 if all(fold.places + fold.taps - 1 <= _TILE for fold in folds) else 2
    transformed = (planes.filters + at_once * (planes.inputs + planes.outputs)) * _plane(_TILE)
    return transformed + (_unfolded(one, folds) if strided else _copies(one, planes))


@dataclass(frozen=True, slots=True)
class _Fold:
    """One dimension of a convolution with strides, written as one without: places, taps and places of the output."""

    places: int
    taps: int
    output: int


def _folded(one: Convolution, dimension: int) -> _Fold:
    stride, padding = one.strides[dimension], one.padding[dimension]
    places = ceil_div(one.data[2 + dimension], stride)
    taps = ceil_div(one.weight[2 + dimension] + -padding % stride, stride)
    return _Fold(places, taps, places + 2 * ceil_div(padding, stride) - taps + 1)


def _unfolded(one: Convolution, folds: Iterable[_Fold]) -> int:
    """Return the bytes of data, weight and output as those of a convolution without strides, channels-last."""
    places, taps, output = (
        math.prod(each) for each in zip(*((f.places, f.taps, f.output) for f in folds), strict=True)
    )
    inside = _unfolded_channels(one)
    data, weight = one.data[0] * one.groups * inside * places, one.weight[0] * inside * taps
    return (data + weight + one.output[0] * one.weight[0] * output) * _REAL + _COPY_HEADER


def _unfolded_channels(one: Convolution) -> int:
    """Return the channels of one group with the pixels between two steps."""
    return (one.filled(one.channels) if one.groups == 1 else one.channels) * math.prod(one.strides)


def winograd(kind: Kind, one: Convolution, images: int | None = None) -> int:
    """Return the workspace of Winograd's method, 0 where there is none.

    Args:
        kind: The operation; an input gradient has tiles of its result, others of the output.
        one: The convolution.
        images: The images that are transformed, if not those of the input.
    """
    if tuple(one.weight[2:]) != (3, 3) or max(one.strides) > 1 or one.channels_last:
        return 0
    tiled = one.data if kind == "input gradient" else one.output
    tiles = math.prod(ceil_div(places, _WINOGRAD_TILE) for places in tiled[2:])
    planes = _Planes.of(one, images=images)
    return (planes.filters + (planes.inputs + planes.outputs) * tiles) * _WINOGRAD_ROWS**2 * _REAL


def _copies(one: Convolution, planes: _Planes) -> int:
    """Return the bytes of copies in the layout that an FFT reads: groups apart, channels before places."""
    data, output = planes.inputs * math.prod(one.data[2:]), planes.outputs * math.prod(one.output[2:])
    if one.groups > 1:
        return sum(round_up(size * _REAL, _ALIGNED) + _ALIGNED for size in (data, output)) if one.data[0] > 1 else 0
    weight = planes.filters * one.taps if one.taps > 1 else 0
    return (data + weight + output) * _REAL + _COPY_HEADER if one.channels_last else 0


def _plane(rows: int) -> int:
    """Return the bytes of the transform of a square of real numbers."""
    return rows * (rows // 2 + 1) * _COMPLEX
