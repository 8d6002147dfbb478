"""Workspaces of convolutions, by decision trees that were learned from cuDNN's own answers.

What each of cuDNN's methods needs follows from the shapes (``methods``). Which one its heuristics choose is looked up
in a tree of comparisons of sizes, one for each operation, type, layout and form of filter. cuDNN compares not only the
sizes, but also what is left over where tiles do not divide a matrix, so that a choice changes from one batch to the
next. The trees are in ``catalog/cudnn_rules.json``, written by benchmarks/cudnn/learned_rules.py.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.catalog.files import read_text
from trainatomy.lookup import leaf
from trainatomy.operators.allocation.arguments import ceil_div
from trainatomy.operators.allocation.cudnn.methods import bytes_of

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

FILE = "cudnn_rules.json"
_OF_TYPE = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 3}
"""Numbers that tell types apart, in place of a size."""
_PATCH = 64
"""Pixels of a patch at least."""
_OF_OUTPUT, _OF_DATA, _OF_CHANNELS = (64, 128, 192, 256, 320, 384, 512, 576), (64, 128, 256, 512), (64, 128)
"""Rows of tiles, which the pixels of all images, or the channels, leave a rest of."""


def learned_workspace(kind: Kind, one: Convolution) -> int | None:
    """Return the bytes of workspace; None where the rules decide that were written by hand."""
    tree = None if one.dtype not in _OF_TYPE or _cuts_patches(one) else _trees()[kind].get(group_of(one))
    return None if tree is None else bytes_of(_methods()[leaf(tree, sizes_of(one))], kind, one)


def _cuts_patches(one: Convolution) -> bool:
    """Return whether images are cut into patches, as for transformers: few such calls were learned from.

    Patches may overlap by up to a half, as those of spectrograms do.
    """
    return one.is_stem and one.taps >= _PATCH and 2 * min(one.strides) >= max(one.weight[2:])


def group_of(one: Convolution) -> str:
    """Return the group of calls that has a tree of its own."""
    form = "product" if one.is_plain_product else "other"
    if one.groups > 1:
        form = "depthwise" if one.channels == 1 else "groups"
    layout = ", channels last" if one.channels_last else ""
    return f"{form}{' of volumes' if len(one.data) == 5 else ''}, {one.itemsize} bytes{layout}"


def sizes_of(one: Convolution) -> tuple[float, ...]:
    """Return the sizes that trees compare."""
    inside, outside, images = one.channels, one.weight[0], one.data[0]
    before, after = math.prod(one.data[2:]), math.prod(one.output[2:])
    return (
        images, inside, outside, after, before, one.places, images * before, one.taps, one.weight[-1],
        max(one.strides), max(one.padding), max(one.dilation), one.output[-1], one.data[-1], one.products, one.length,
        inside * outside, inside * outside / (before * (inside + outside)), math.prod(one.data), math.prod(one.output),
        math.gcd(inside, 64), math.gcd(outside, 64), math.gcd(after, 16), math.gcd(before, 16),
        math.gcd(one.places, 64), ceil_div(one.places, 128) * ceil_div(outside, 128),
        ceil_div(outside, 128) * ceil_div(one.length, 128), ceil_div(images * before, 128) * ceil_div(inside, 128),
        _OF_TYPE[one.dtype],
        *(one.places % rows for rows in _OF_OUTPUT), *(images * before % rows for rows in _OF_DATA),
        *(channels % rows for rows in _OF_CHANNELS for channels in (inside, outside)),
        after / before, one.weight[2], one.output[2], one.data[2],
    )  # fmt: skip


def _trees() -> Any:
    return _contents()["trees"]


def _methods() -> Any:
    return _contents()["methods"]


@cache
def _contents() -> Any:
    return json.loads(read_text(FILE))
