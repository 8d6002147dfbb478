"""One convolution as cuDNN is asked for it, and how much workspace each of its three operations takes.

Shapes: input [N, C, ...], weight [K, C/groups, ...], output [N, K, ...].  cuDNN's heuristics (``cudnn.benchmark`` off)
choose an engine; which one, and what it needs, is documented nowhere.  Read off an H200 (cuDNN 9.19, torch 2.11; fp32
with TF32, fp16, bf16), by random convolutions and by recorded trainings, and assumed for other cards with tensor cores.

What an engine needs is exact, but which engine runs is not always guessed. Rules made on 2,500 random convolutions and
recorded trainings met 61 % of the workspaces of 3,500 others to the byte and missed 22 % of the bytes (40 % and 32 % by
rules read off image models alone). Those others were in view when the rules were then adjusted to recorded trainings,
by which these shares did not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainatomy.operators.allocation.arguments import round_up

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

Kind = Literal["forward", "input gradient", "weight gradient"]

FILL = 16
"""Bytes that the channels of one place are padded to."""
HEADER = 16
OF_WIDE = 131
"""What engines with wide tiles take besides."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call: shapes, type and layout, ``strides``, ``padding`` and ``dilation`` by dimension.

    A ``transposed`` one is told as the convolution of which it is the gradient: ``data`` is what comes out of it.
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

    @property
    def key(self) -> Hashable:
        """Equal for calls that cuDNN is asked about once."""
        shapes = self.data, self.weight, self.output
        how = tuple(self.strides), tuple(self.padding), tuple(self.dilation), self.groups
        return shapes, self.dtype, how, self.channels_last

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def is_half(self) -> bool:
        """Of 16 bits."""
        return self.itemsize == 2

    @property
    def channels(self) -> int:
        """C of one group."""
        return self.weight[1]

    @property
    def taps(self) -> int:
        """Places of the filter."""
        return math.prod(self.weight[2:])

    @property
    def length(self) -> int:
        """Terms of the sum that makes one number of the output."""
        return math.prod(self.weight[1:])

    @property
    def places(self) -> int:
        """Places of the output, of all images together."""
        return self.output[0] * math.prod(self.output[2:])

    @property
    def products(self) -> int:
        """Multiplications and additions of one operation."""
        return math.prod(self.output) * self.length

    @property
    def is_plain_product(self) -> bool:
        """A 1x1 filter without strides or padding: one matrix product for each image."""
        return self.taps == 1 and max(self.strides) == 1 and not any(self.padding)

    @property
    def is_stem(self) -> bool:
        """On images of colours, or fewer channels."""
        return self.channels < 4

    @property
    def fill(self) -> int:
        """Channels that fill 16 bytes."""
        return FILL // self.itemsize

    def filled(self, channels: int) -> int:
        """``channels`` padded to 16 bytes."""
        return round_up(channels, self.fill)
