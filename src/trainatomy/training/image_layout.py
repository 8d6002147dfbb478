"""What an image becomes before the encoder sees it: its size, and the tiles that it is cut into.

The rules are those of transformers' image processors (5.17), with the limits of the released checkpoints where a
model's configuration does not have them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from trainatomy.training.shape import Shape


class Layout(NamedTuple):
    """An image as the encoder sees it.

    Attributes:
        height: Pixels of the image, or of each of its tiles.
        width: The same.
        rows: Rows of tiles beside the whole image; 0 if it is not cut.
        columns: Columns of tiles.
        has_whole: Whether the encoder sees the whole image beside its tiles.
    """

    height: int
    width: int
    rows: int = 0
    columns: int = 0
    has_whole: bool = True

    @property
    def views(self) -> int:
        """Return how many images of this size the encoder sees."""
        return self.rows * self.columns + self.has_whole


Rule = Callable[["Shape", int, int], Layout]

_QWEN2, _QWEN3 = (56**2, 3584**2), (256**2, 4096**2)
_GLM = (112**2 // 2, 28**2 * 15000 // 2)  # counts an image as two frames
_PIXELS: dict[str, tuple[int, int]] = {
    "qwen2_vl": _QWEN2, "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3, "qwen3_vl_moe": _QWEN3, "qwen3_5": _QWEN3, "qwen3_5_moe": _QWEN3,
    "glm4v": _GLM, "glm4v_moe": _GLM, "glm46v": _GLM,
    "paddleocr_vl": (384**2, 1536**2),
}  # fmt: skip
"""Fewest and most pixels of an image that is cut into patches, by the type of the model.

Those of Qwen are in ``preprocessor_config.json`` of Qwen/Qwen2-VL-7B-Instruct, Qwen2.5-VL and Qwen3-VL; the others are
the defaults of the processors' classes.
"""

_CROPPED = frozenset({"internvl", "aya_vision", "cohere2_vision", "qianfan_ocr"})
"""Types of models whose processors crop up to 12 tiles, in the grid with the proportions of the image."""
_CROPS = (1, 12)

_SPLIT = frozenset({"idefics3", "smolvlm"})
"""Types of models whose processors enlarge the longer side to four tiles."""
_SPLIT_SIDE = 4

_EDGES = (800, 1333)
_PADDED = {
    **dict.fromkeys(
        ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer", "grounding-dino",
         "mm-grounding-dino"), 1
    ),
    "maskformer": 32, "mask2former": 32,
}  # fmt: skip
"""Types of models whose processors resize images by their edges and pad those of a batch to the largest, beside a mask
(``pixel_mask``), with the number of which sides are multiples.  ``_EDGES``: the shortest edge, and the most of the
longest (``DetrImageProcessor`` and the others)."""

_RESIZED = frozenset({
    "llava", "vipllava", "paligemma", "gemma3", "gemma3n", "florence2", "deepseek_vl", "janus", "got_ocr2",
})  # fmt: skip
"""Types of models that join text and images of one size, to which their processors resize."""

SEVERAL = frozenset({
    *_PIXELS, *_CROPPED, *_SPLIT, "llava", "llava_next", "vipllava", "paligemma", "gemma3", "idefics2", "mistral3",
    "lighton_ocr", "mllama",
})  # fmt: skip
"""Types of models whose samples may have several images."""


def rule_of(shape: Shape) -> Rule | None:
    """Return what a model's processor does with an image of any size, or ``None`` if that is not known."""
    kind = str(getattr(shape.config, "model_type", ""))
    if pads_images(shape):
        return _by_edges
    if shape.takes_whole_images:
        return _whole
    if kind in _PIXELS and shape.grid_unit:
        return _fitted
    if shape.pinpoints:
        return _at_pinpoints
    rules = {**dict.fromkeys(_CROPPED, _cropped), **dict.fromkeys(_SPLIT, _split), "mllama": _on_canvas}
    if kind in rules:
        return rules[kind]
    has_one_size = kind in _RESIZED or (shape.image_token is None and "spatial_shapes" not in shape.parameters)
    return (_as_it_is if shape.default_size_is_assumed else _resized) if has_one_size else None


def scaled(size: tuple[int, int], pixels: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image that is scaled to the fewest and most pixels before the processor.

    LLaMA-Factory does this (``_preprocess_image``), and ms-swift to the most pixels (``rescale_image``).
    """
    height, width = size
    fewest, most = pixels
    for is_beyond, limit in ((operator.gt, most), (operator.lt, fewest)):
        if is_beyond(height * width, limit):
            factor = math.sqrt(limit / (height * width))
            height, width = int(height * factor), int(width * factor)
    return height, width


def pads_images(shape: Shape) -> bool:
    """Return whether a model takes images of several sizes in one batch, padded to the largest."""
    return getattr(shape.config, "model_type", "") in _PADDED and "pixel_mask" in shape.parameters


def has_limits(shape: Shape) -> bool:
    """Return whether a model's processor has limits that ``data.image_limits`` can change."""
    return rule_of(shape) in (_fitted, _by_edges, _cropped)


def refuse_size(shape: Shape) -> WorkloadError:
    """Return the error of a model whose images have a size of their own that is not known to be another."""
    _, height, width = shape.default_image_size
    return WorkloadError(
        f"data.image_size: how {shape.class_name} makes tokens of an image of another size than {height} × {width} is "
        "not known: leave it out, or name a function that makes the batch (data.factory)",
        key="data.image_size",
    )


def _as_it_is(shape: Shape, height: int, width: int) -> Layout:
    return Layout(height, width)


def _resized(shape: Shape, height: int, width: int) -> Layout:
    return Layout(*shape.default_image_size[1:])


def _by_edges(shape: Shape, height: int, width: int) -> Layout:
    """DETR: the shortest edge gets its size, or as much as leaves the longest within its limit."""
    shortest, longest = shape.limits or _EDGES
    short, long = sorted((height, width))
    exact = min(float(shortest), longest * short / long)
    if (side := round(exact)) != short:
        long = int(exact * long / short)
    sides = (side, long) if height <= width else (long, side)
    unit = _PADDED[shape.config.model_type]
    high, wide = (math.ceil(each / unit) * unit for each in sides)
    return Layout(high, wide)


def _whole(shape: Shape, height: int, width: int) -> Layout:
    """Pixtral: shrunk to the longest side that its encoder was made for, and stretched to whole patches."""
    longest, unit = max(shape.default_image_size[1:]), int(shape.vision.patch_size) * shape.merge
    ratio = max(height / longest, width / longest, 1)
    return Layout(math.ceil(int(height / ratio) / unit) * unit, math.ceil(int(width / ratio) / unit) * unit)


def _fitted(shape: Shape, height: int, width: int) -> Layout:
    """Qwen2-VL (``smart_resize``): sides are multiples of merged patches, and pixels within the limits."""
    unit = shape.grid_unit
    fewest, most = shape.limits or _PIXELS[shape.config.model_type]
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > most:
        ratio = math.sqrt(height * width / most)
        rows, columns = (max(math.floor(side / ratio / unit), 1) for side in (height, width))
    elif rows * columns * unit**2 < fewest:
        ratio = math.sqrt(fewest / (height * width))
        rows, columns = (math.ceil(side * ratio / unit) for side in (height, width))
    return Layout(rows * unit, columns * unit)


def _at_pinpoints(shape: Shape, height: int, width: int) -> Layout:
    """LLaVA-NeXT: tiles of the size, of those offered, that keeps the most of the image and adds the least."""
    from transformers.image_processing_utils import select_best_resolution

    _, tile_height, tile_width = shape.default_image_size
    best_height, best_width = select_best_resolution((height, width), shape.config.image_grid_pinpoints)
    return Layout(tile_height, tile_width, best_height // tile_height, best_width // tile_width)


def _cropped(shape: Shape, height: int, width: int) -> Layout:
    """InternVL: the grid of tiles with the nearest proportions, with the most tiles that the image half fills."""
    fewest, most = shape.limits or _CROPS
    _, tile_height, tile_width = shape.default_image_size

    def difference(rows: int, columns: int) -> float:
        return abs(width / height - columns / rows)

    grids = [grid for grid in _grids(most) if math.prod(grid) >= fewest]
    nearest = min(difference(*grid) for grid in grids)
    first, *further = [grid for grid in grids if difference(*grid) == nearest]
    filled = [grid for grid in further if height * width > 0.5 * tile_height * tile_width * math.prod(grid)]
    rows, columns = (filled or [first])[-1]
    return Layout(tile_height, tile_width, *((rows, columns) if rows * columns > 1 else ()))


def _grids(most: int) -> Iterable[tuple[int, int]]:
    """Yield rows and columns of grids of up to ``most`` tiles, smaller ones first."""
    sides = range(1, most + 1)
    grids = [(rows, columns) for columns in sides for rows in sides if rows * columns <= most]
    return sorted(grids, key=math.prod)


def _split(shape: Shape, height: int, width: int) -> Layout:
    """Idefics 3: the longer side becomes four tiles, the other keeps the proportions in whole tiles."""
    _, tile, _ = shape.default_image_size
    longest = _SPLIT_SIDE * tile
    proportions = width / height
    shorter = int(longest / proportions if width >= height else longest * proportions)
    count = max(math.ceil((shorter + shorter % 2) / tile), 1)
    rows, columns = (count, _SPLIT_SIDE) if width >= height else (_SPLIT_SIDE, count)
    return Layout(tile, tile, rows, columns)


def _on_canvas(shape: Shape, height: int, width: int) -> Layout:
    """Llama 3.2 Vision: the grid that enlarges the image least, or else shrinks it least; the smallest of those."""
    _, tile, _ = shape.default_image_size

    def scale(grid: tuple[int, int]) -> float:
        return min(grid[0] * tile / height, grid[1] * tile / width)

    grids = tile_grids(shape)
    larger = [scale(grid) for grid in grids if scale(grid) >= 1]
    chosen = min(larger) if larger else max(map(scale, grids))
    rows, columns = min((grid for grid in grids if scale(grid) == chosen), key=math.prod)
    return Layout(tile, tile, rows, columns, has_whole=False)


def tile_grids(shape: Shape) -> list[tuple[int, int]]:
    """Return rows and columns of the grids of tiles that Llama 3.2 Vision has embeddings for, in their order."""
    return [(rows, columns) for rows, columns in shape.vision.supported_aspect_ratios]
