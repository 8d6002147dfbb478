"""Workspaces of plans that cuDNN names only on a GPU, as an H200's handle answered (cuDNN 9.19)."""

from __future__ import annotations

import pytest
import torch

from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan
from trainatomy.operators.allocation.cudnn.unnamed import unnamed_workspaces

Shape = tuple[int, ...]
FFT: dict[str, tuple[Kind, Shape, Shape, Shape, int, Shape, int, bool, int]] = {
    "wide": ("forward", (6, 48, 56, 56), (256, 48, 4, 4), (6, 256, 57, 57), 1, (2, 2), 1, False, 425754624),
    "outputs": ("forward", (16, 3, 224, 224), (64, 3, 3, 3), (16, 64, 224, 224), 1, (1, 1), 1, False, 541072128),
    "of one place": ("forward", (16, 32, 1, 1), (8, 32, 1, 1), (16, 8, 1, 1), 1, (0, 0), 1, False, 1770496),
    "product": ("forward", (16, 192, 28, 28), (128, 192, 1, 1), (16, 128, 28, 28), 1, (0, 0), 1, False, 240746496),
    "row": ("forward", (4, 1280, 1, 149), (144, 1280, 1, 7), (4, 144, 1, 149), 1, (0, 3), 1, False, 100102225920),
    "groups": ("forward", (1, 96, 256, 256), (112, 48, 7, 7), (1, 112, 250, 250), 1, (0, 0), 2, False, 2892370944),
    "last": ("forward", (6, 24, 20, 20), (160, 24, 7, 7), (6, 160, 14, 14), 1, (0, 0), 1, True, 37165072),
    "weight": (
        "weight gradient", (16, 256, 28, 28), (256, 256, 3, 3), (16, 256, 28, 28), 1, (1, 1), 1, False, 583270400,
    ),
    "weight, depthwise": (
        "weight gradient", (3, 32, 80, 80), (640, 1, 1, 1), (3, 640, 80, 80), 1, (0, 0), 32, True, 92283008,
    ),
    "input, one tile": (
        "input gradient", (16, 256, 13, 13), (256, 256, 3, 3), (16, 256, 13, 13), 1, (1, 1), 1, False, 320864256,
    ),
    "input, tiles": (
        "input gradient", (32, 48, 128, 128), (160, 48, 3, 3), (32, 160, 128, 128), 1, (1, 1), 1, False, 91357184,
    ),
    "input, groups": (
        "input gradient", (16, 256, 28, 28), (256, 8, 3, 3), (16, 256, 28, 28), 1, (1, 1), 32, False, 17563776,
    ),
    "input, strides": (
        "input gradient", (64, 256, 8, 8), (512, 256, 4, 4), (64, 512, 4, 4), 2, (1, 1), 1, False, 2734686224,
    ),
    "input, colours": (
        "input gradient", (64, 3, 64, 64), (64, 3, 4, 4), (64, 64, 32, 32), 2, (1, 1), 1, False, 70029328,
    ),
    "input, strides of eight": (
        "input gradient", (1, 192, 28, 28), (128, 192, 16, 16), (1, 128, 4, 4), 8, (8, 8), 1, False, 6925103632,
    ),
}  # fmt: skip


def called(
    data: Shape, weight: Shape, output: Shape, stride: int, padding: Shape, groups: int, last: bool
) -> Convolution:
    shapes = torch.Size(data), torch.Size(weight), torch.Size(output)
    return Convolution(*shapes, torch.float32, [stride] * 2, padding, [1, 1], groups, False, last, 132)


@pytest.mark.parametrize("name", FFT)
def test_an_fft_needs_planes_of_complex_numbers(name: str) -> None:
    kind, *call, workspace = FFT[name]
    assert workspace in unnamed_workspaces(kind, called(*call), ())


def test_weight_gradients_of_three_by_three_have_a_plan_by_winograd() -> None:
    one = called((16, 256, 28, 28), (256, 256, 3, 3), (16, 256, 28, 28), 1, (1, 1), 1, False)
    assert 67239936 in unnamed_workspaces("weight gradient", one, ())


def test_the_last_plan_copies_all_tensors() -> None:
    one = called((64, 3, 64, 64), (64, 3, 4, 4), (64, 64, 32, 32), 2, (1, 1), 1, False)
    assert unnamed_workspaces("forward", one, ()) == (19935616,)
    assert unnamed_workspaces("forward", one, (), tf32=False) == ()
    assert (
        unnamed_workspaces("forward", called((16, 8, 9, 9), (8, 8, 3, 3), (16, 8, 4, 4), 2, (0, 0), 1, True), ()) == ()
    )


@pytest.mark.parametrize(("engines", "expected"), [((58, 65, 56), 0), ((76, 58, 56), 1), ((76, 65), 0)])
def test_an_fft_with_strides_is_named_beside_certain_engines(engines: tuple[int, ...], expected: int) -> None:
    one = called((128, 256, 8, 8), (512, 256, 4, 4), (128, 512, 4, 4), 2, (1, 1), 1, False)
    named = [EnginePlan(engine, (), (), 0) for engine in engines]
    listed = unnamed_workspaces("input gradient", one, [*named, EnginePlan(56, (), (), 0, last=True)])
    assert sum(size > 10**9 for size in listed) == expected


def test_patches_16_bits_and_dilated_filters_have_no_fft() -> None:
    patches = called((8, 3, 64, 64), (32, 3, 16, 16), (8, 32, 4, 4), 16, (0, 0), 1, True)
    assert unnamed_workspaces("input gradient", patches, ()) == ()
