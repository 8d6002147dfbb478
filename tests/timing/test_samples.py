"""What sampling images by a grid costs, which depends on where neighbouring samples lie."""

from __future__ import annotations

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.timing.cost_model import cost_model_of

H100 = cost_model_of(find_gpu("h100-sxm"))


def seconds(shape: str, *, backward: bool = False, mode: int = 0) -> float:
    images, channels, height, width, rows, places = shape.split()
    image, grid, result = (
        f"{images},{channels},{height},{width}",
        f"{images},{rows},{places},2",
        f"{images},{channels},{rows},{places}",
    )
    numbers = f"interpolation_mode={mode};padding_mode=0;align_corners=False"
    text = f"aten::grid_sampler_2d(f32[{image}],f32[{grid}])->f32[{result}];{numbers}"
    if backward:
        both = f"f32[{image}],f32[{grid}]"
        text = f"aten::grid_sampler_2d_backward(f32[{result}],{both})->{both};{numbers}"
    return kernel_work(from_text(text), H100.chip).seconds


ATTENTION = [f"16 32 {side} {side} 8400 4" for side in (80, 40, 20)]
"""Deformable attention of a Mask2Former: each pixel of three images asks for four places."""


@pytest.mark.parametrize(("backward", "measured"), [(False, 940e-6), (True, 8250e-6)])
def test_queries_that_follow_the_pixels_read_lines_together(backward: bool, measured: float) -> None:
    """18 calls within a training on an H100; its samples of random points, of one channel, are taken off."""
    assert 6 * sum(seconds(shape, backward=backward) for shape in ATTENTION) == pytest.approx(measured, rel=0.15)


def test_random_points_read_a_line_each() -> None:
    """15 calls of an EoMT on an H100, whose other calls are taken off, take 0.63 ms."""
    assert 15 * seconds("200 1 160 160 12544 1") == pytest.approx(0.63e-3, rel=0.15)
    apart, together = (seconds(f"4 64 160 160 {grid}") for grid in ("12544 1", "112 112"))
    assert together < 0.5 * apart  # rows that go across the image


def test_few_boxes_are_sampled_apart() -> None:
    """Gradients of an RT-DETR's 496 boxes: 1.93 ms for 18 calls on an H100."""
    shapes = [f"32 32 {side} {side} 496 4" for side in (80, 40, 20)]
    assert 6 * sum(seconds(shape, backward=True) for shape in shapes) == pytest.approx(1.93e-3, rel=0.2)


def test_nearest_neighbours_read_one_place_for_each() -> None:
    bilinear, nearest, cubic = (seconds("4 64 160 160 12544 1", backward=True, mode=mode) for mode in (0, 1, 2))
    assert nearest < 0.7 * bilinear
    assert cubic > 2 * bilinear
