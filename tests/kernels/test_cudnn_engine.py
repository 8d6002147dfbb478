"""Workspaces of convolutions as an H200 took them (torch 2.11, cuDNN 9.19)."""

from __future__ import annotations

import pytest
import torch

from trainatomy.world.kernels.cudnn_engine import Convolution

HALF, FLOAT = torch.bfloat16, torch.float32


def convolution(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int = 1,
    padding: int = 0,
    dtype: torch.dtype = FLOAT,
    last: bool = False,
) -> Convolution:
    spatial = [(size + 2 * padding - filter_) // stride + 1 for size, filter_ in zip(data[2:], weight[2:], strict=True)]
    output = torch.Size((data[0], weight[0], *spatial))
    strides, paddings = [stride] * len(spatial), [padding] * len(spatial)
    return Convolution(torch.Size(data), torch.Size(weight), output, dtype, strides, paddings, last, 132)


IMAGES, PATCHES = (8, 3, 224, 224), (768, 3, 16, 16)
SQUARE, THREE = (8, 64, 56, 56), (64, 64, 3, 3)


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        (convolution(IMAGES, PATCHES, 16), (0, 11993104, 14385296)),
        (convolution(IMAGES, PATCHES, 16, dtype=HALF), (11976720, 5996560, 11976720)),
        (convolution(SQUARE, THREE, 1, 1), (6570000, 12992528, 15057575)),
        (convolution(SQUARE, THREE, 1, 1, HALF), (6496272, 6496272, 8413863)),
        (convolution(SQUARE, THREE, 1, 1, HALF, last=True), (0, 0, 1917591)),
        (convolution((16, 128, 28, 28), (128, 128, 3, 3), 1, 1), (13434896, 13434896, 17564327)),
        (convolution((16, 256, 28, 28), (256, 256, 3, 3), 2, 1), (18415632, 18415763, 25494111)),
        (convolution((16, 512, 7, 7), (2048, 512, 1, 1)), (8028176, 8028176, 8028176)),
        (convolution((16, 64, 56, 56), (256, 64, 1, 1)), (0, 0, 1048576)),
        (convolution((16, 1024, 14, 14), (2048, 1024, 1, 1), 2), (19267600, 19267731, 19267600)),
        (convolution((8, 256, 56, 56), (512, 256, 1, 1), 2, dtype=HALF), (19267600, 19267731, 19267600)),
    ],
)
def test_as_measured(case: Convolution, measured: tuple[int, int, int]) -> None:
    kinds = ("forward", "input gradient", "weight gradient")
    assert tuple(case.workspace(kind) for kind in kinds) == measured


def test_images_are_padded_to_four_channels_for_the_first_filters_in_fp16() -> None:
    stem = convolution(IMAGES, (64, 3, 7, 7), 2, 3, torch.float16)
    assert stem.workspace("forward") == 16081424
    assert convolution(IMAGES, (64, 3, 7, 7), 2, 3, HALF).workspace("forward") == 19317776


def test_one_dimension() -> None:
    whisper = convolution((2, 512, 3000), (512, 512, 3), 2, 1, HALF)
    assert whisper.workspace("forward") == whisper.workspace("weight gradient") == 10788880
    assert whisper.workspace("input gradient") == 10788880 + 131
