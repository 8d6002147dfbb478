"""Detectors: boxes whose number and size depend on values, and torchvision's operators on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from trainatomy.operators.registry import find
from trainatomy.simulator.process import SimulatedProcess

COUNT = 100
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Define torchvision's operators where it is not installed."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        library.impl("roi_align", lambda x, rois, s, h, w, r, a: x.new_empty(len(rois), x.shape[1], h, w), "Meta")
        yield
        library._destroy()
        return
    yield


def allocated(process: SimulatedProcess, run: Callable[[], Any]) -> tuple[list[tuple[str, int]], Any]:
    """Return what a function allocates and has not released when it returns, and its result."""
    begin = len(process.trace.events)
    result = run()
    events = process.trace.events[begin:]
    origins = process.trace.origins
    return [(origins[e.allocation].operation, e.bytes) for e in events if e.action == "alloc"], result


def test_nms_is_taken_to_keep_all_boxes(process: SimulatedProcess) -> None:
    noted: list[str] = []
    process.recorder.sizes.assumes = noted.append
    boxes, scores = torch.rand(COUNT, 4, device="cuda"), torch.rand(COUNT, device="cuda")
    made, kept = allocated(process, lambda: torch.ops.torchvision.nms(boxes, scores, 0.5))
    assert kept.shape == (COUNT,) and kept.dtype == torch.long and kept.is_cuda
    assert noted == ["torchvision::nms"]
    assert ("torchvision::nms", COUNT * 2 * 8) in made  # a bit for each pair, in words of 64
    assert ("aten::index_select", COUNT * 4 * 4) in made
    assert made[-2:] == [("aten::_to_copy", COUNT * 8), ("aten::index", COUNT * 8)]
    assert torch.ops.torchvision.nms(boxes[:0], scores[:0], 0.5).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operators_of_torchvision_run_in_fp32_under_autocast(process: SimulatedProcess, dtype: torch.dtype) -> None:
    image, boxes = torch.randn(2, 8, 16, 16, device="cuda", dtype=dtype), torch.rand(5, 5, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        made, pooled = allocated(process, lambda: torch.ops.torchvision.roi_align(image, boxes, 1.0, 7, 7, 2, False))
    assert pooled.dtype == dtype and pooled.shape == (5, 8, 7, 7)
    assert ("torchvision::roi_align", 5 * 8 * 7 * 7 * 4) in made


def test_regions_are_pooled_from_a_contiguous_copy(process: SimulatedProcess) -> None:
    image = torch.randn(2, 8, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    boxes = torch.rand(5, 5, device="cuda")
    made, _ = allocated(process, lambda: torch.ops.torchvision.roi_align(image, boxes, 1.0, 7, 7, 2, False))
    assert [size for _, size in made] == [5 * 8 * 7 * 7 * 4, image.numel() * 4]


def test_a_deformable_convolution_unfolds_some_images_at_a_time(process: SimulatedProcess) -> None:
    """Of 34 images, 17 are unfolded at once: the greatest divisor up to 32."""
    count, channels, outputs, side = 34, 8, 6, 8
    image = torch.randn(count, channels, side, side, device="cuda")
    weight, bias = torch.randn(outputs, channels // 2, 3, 3, device="cuda"), torch.randn(outputs, device="cuda")
    offset, mask = (torch.randn(count, each * 9, side, side, device="cuda") for each in (2, 1))
    numbers = (1, 1, 1, 1, 1, 1, 2, 1, True)
    columns = channels * 9 * 17 * side * side * 4
    made, out = allocated(
        process, lambda: torch.ops.torchvision.deform_conv2d(image, weight, offset, mask, bias, *numbers)
    )
    sizes = [size for _, size in made]
    assert out.shape == (count, outputs, side, side)
    assert sizes.count(out.numel() * 4) == 3 and columns in sizes  # zeros, a buffer of them, and with the bias
    made, grads = allocated(
        process,
        lambda: torch.ops.torchvision._deform_conv2d_backward(out, image, weight, offset, mask, bias, *numbers),
    )
    assert [grad.shape for grad in grads] == [each.shape for each in (image, weight, offset, mask, bias)]
    assert [size for _, size in made].count(columns) == 2


@pytest.mark.parametrize("name", ["nms", "roi_align", "_roi_align_backward", "ps_roi_pool", "deformable_im2col"])
def test_operators_of_torchvision_have_rows(name: str) -> None:
    row = find(f"torchvision::{name}")
    assert row is not None and row.cost and row.launch == "library"


def test_numbers_that_python_reads_of_a_box_agree(process: SimulatedProcess) -> None:
    """As torchvision pastes a mask into an image, and resizes the heat map of a box."""
    box = torch.randn(4, device="cuda").to(torch.int64)
    width = max(int(box[2] - box[0] + 1), 1)
    left, right = max(box[0], 0), min(box[2] + 1, 320)
    mask = torch.randn(1, width, device="cuda")
    image = torch.zeros(1, 320, device="cuda")
    image[:, left:right] = mask[:, left - box[0] : right - box[0]]
    assert (width, int(left), int(right)) == (1, 0, 1)
    widths = torch.randn(3, device="cuda").clamp(min=1)
    assert int(widths.ceil()[0].item()) == 1
    assert bool((widths > 2).any()), "a bool that follows from fractions is taken as True"


def test_such_numbers_decide_no_size_and_no_choice(process: SimulatedProcess) -> None:
    noted: list[str] = []
    process.recorder.sizes.assumes = noted.append
    whole = torch.randn(6, 8, device="cuda").to(torch.int64)
    assert whole[whole[:, 0] > 3].shape == (6, 8) and noted == ["aten::index"]
    chosen = torch.randn(6, 3, device="cuda").clamp(min=1e-6).topk(1).indices
    assert (chosen == 2).nonzero().shape[0] == 2


@pytest.mark.parametrize("is_degenerate", [False, True])
def test_a_bool_that_follows_from_data_of_the_batch_is_what_it_is(
    process: SimulatedProcess, is_degenerate: bool
) -> None:
    boxes = torch.tensor([[10.0, 10.0, 200.0, 200.0], [50.0, 60.0, 30.0 if is_degenerate else 300.0, 300.0]]).cuda()
    wrong = boxes[:, 2:] <= boxes[:, :2]
    assert bool(wrong.any()) is is_degenerate
    assert len(torch.where(wrong.any(dim=1))[0]) == is_degenerate
    assert not bool(torch.isnan(boxes).any())
