"""The parameters of a convolution as cuDNN is called, which its workspaces follow from.

Shapes: input [N, C, ...], weight [K, C/groups, ...], output [N, K, ...]. cuDNN's heuristics (``cudnn.benchmark`` off)
choose an engine; neither the choice nor the engine's workspace is documented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainatomy.allocator.blocks import round_up

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

Kind = Literal["forward", "input gradient", "weight gradient"]

FILL = 16
"""Bytes that the channels of one pixel are padded to."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution call: shapes, type and layout, ``strides``, ``padding`` and ``dilation`` by dimension.

    A ``transposed`` convolution is described as the one of which it is the gradient: ``data`` is its result.
    """

    data: torch.Size
    weight: torch.Size
    output: torch.Size
    dtype: torch.dtype
    strides: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    transposed: bool
    channels_last: bool
    multiprocessors: int
    level_factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """A key that is equal for calls for which cuDNN chooses once."""
        shapes = self.data, self.weight, self.output
        how = tuple(self.strides), tuple(self.padding), tuple(self.dilation), self.groups
        return shapes, self.dtype, how, self.channels_last

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def is_half(self) -> bool:
        """Return whether the type has 16 bits."""
        return self.itemsize == 2

    @property
    def channels(self) -> int:
        """C of one group."""
        return self.weight[1]

    @property
    def taps(self) -> int:
        """Positions of the filter."""
        return math.prod(self.weight[2:])

    @property
    def length(self) -> int:
        """Terms of the sum that makes one element of the output."""
        return math.prod(self.weight[1:])

    @property
    def places(self) -> int:
        """Pixels of the output, of all images together."""
        return self.output[0] * math.prod(self.output[2:])

    @property
    def products(self) -> int:
        """Multiply-adds of one operation."""
        return math.prod(self.output) * self.length

    @property
    def is_plain_product(self) -> bool:
        """Return whether a 1x1 filter without strides or padding makes it one matrix product for each image."""
        return self.taps == 1 and max(self.strides) == 1 and not any(self.padding)

    @property
    def is_stem(self) -> bool:
        """Return whether the input has the channels of colour images, or fewer."""
        return self.channels < 4

    @property
    def fill(self) -> int:
        """Channels that fill 16 bytes."""
        return FILL // self.itemsize

    def filled(self, channels: int) -> int:
        """Return ``channels`` padded to 16 bytes."""
        return round_up(channels, self.fill)
