"""torchvision's operators whose CUDA code calls operators of PyTorch: these run in their place, and allocate the same.

How many boxes ``nms`` keeps depends on values; it is taken to keep all.  Source: torchvision/csrc/ops/autocast,
cuda/nms_kernel.cu and cuda/deform_conv2d_kernel.cu, torchvision 0.24-0.29.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.operators.allocation.above_autograd import one_operation

if TYPE_CHECKING:
    from trainatomy.simulator.recorder import Recorder


_aten: Any = torch.ops.aten
_BOXES_OF_BLOCK = 64
"""Boxes that a block of ``nms`` compares, one bit each (``threadsPerBlock``)."""
_MOST_PARALLEL_IMAGES = 32
"""Images that a deformable convolution unfolds at once (``kMaxParallelImgs``)."""

IN_FP32 = frozenset(
    f"torchvision::{name}" for name in ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
)
"""Operators that autocast runs in float32; fractions among their results get the type of the first argument."""


def nms(recorder: Recorder, boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Compare all boxes with each other; the host reads which overlap, and says which are kept."""
    count = boxes.shape[0]
    if not boxes.numel():
        return torch.empty(0, dtype=torch.long, device="meta")
    _, order = _aten.sort(scores, 0, True)
    ordered = _contiguous(_aten.index_select(boxes, 0, order))
    with one_operation("torchvision::nms", ordered) as results:
        mask = torch.empty(count * -(-count // _BOXES_OF_BLOCK), dtype=torch.long, device="meta")
        results.append(mask)
    before, recorder.stage = recorder.stage, "host"
    try:
        _aten._to_copy(mask)
    finally:
        recorder.stage = before
    if recorder.sizes.assumes is not None:
        recorder.sizes.assumes("torchvision::nms")
    kept = _aten._to_copy(torch.arange(count, device="cpu"), device=torch.device("meta"))
    picked: torch.Tensor = _aten.index(order, [kept])
    return picked


def deform_conv2d(recorder: Recorder, *arguments: Any) -> torch.Tensor:
    """Unfold some images at a time at the positions that the offsets say, and multiply them with the weights."""
    (image, weight, offset, mask, bias), numbers = map(_contiguous, arguments[:5]), arguments[5:]
    groups, uses_mask = numbers[6], numbers[8]
    count, channels = image.shape[:2]
    height, width = offset.shape[2:]
    out = _zeros(image, count, weight.shape[0], height, width)
    if not count:
        return out
    parallel = _parallel_images(count)
    joined = _zeros(image, count // parallel, groups, weight.shape[0] // groups, parallel * height, width)
    columns = _zeros(image, groups, channels * weight[0, 0].numel() // groups, parallel * height * width)
    rows = weight.view(groups, weight.shape[0] // groups, -1)
    for part in range(count // parallel):
        _kernel(
            "deformable_im2col", columns, image[:parallel], offset[:parallel], mask[:parallel] if uses_mask else None
        )
        for group in range(groups):
            _aten.addmm_(joined[part][group].flatten(1), rows[group], columns[group])
    _aten.copy_(out, joined.view(count, weight.shape[0], height, width))
    result: torch.Tensor = _aten.add(out, bias.view(1, -1, 1, 1))
    return result


def deform_conv2d_backward(recorder: Recorder, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of what was unfolded, and add them up where it was read."""
    (grad, image, weight, offset, mask, bias), numbers = map(_contiguous, arguments[:6]), arguments[6:]
    groups, uses_mask = numbers[6], numbers[8]
    count, outputs = image.shape[0], weight.shape[0]
    grad_image, grad_offset, grad_mask = (_aten.zeros_like(tensor) for tensor in (image, offset, mask))
    if not count:
        return grad_image, _aten.zeros_like(weight), grad_offset, grad_mask, _aten.mul(_aten.ones_like(bias), 0)
    parallel = _parallel_images(count)
    parts, rows = count // parallel, weight.view(groups, outputs // groups, -1)
    divided = grad.view(parts, parallel, groups, outputs // groups, *grad.shape[2:]).permute(0, 2, 3, 1, 4, 5)
    masks = (mask[:parallel], grad_mask[:parallel]) if uses_mask else (None, None)
    size = groups, image.shape[1] * weight[0, 0].numel() // groups, parallel * grad[0, 0].numel()
    columns = torch.empty(size, dtype=image.dtype, device="meta")
    for part in range(parts):
        _aten.zero_(columns)
        for group in range(groups):
            _aten.addmm_(columns[group], rows[group].t(), divided[part][group].flatten(1))
        shared = columns, image[:parallel], offset[:parallel], masks[0]
        _kernel("deformable_col2im_coord", grad_offset[:parallel], *shared, masks[1])
        _kernel("deformable_col2im", grad_image[:parallel], columns, offset[:parallel], masks[0])
    del columns
    grad_weight = _aten.zeros_like(weight)
    divided = _contiguous(divided)
    columns = torch.empty(size, dtype=image.dtype, device="meta")
    for part in range(parts):
        _kernel("deformable_im2col", columns, image[:parallel], offset[:parallel], masks[0])
        for group in range(groups):
            gathered = grad_weight.view(groups, outputs // groups, -1)[group]
            _aten.addmm_(gathered, divided[part][group].flatten(1), columns[group].t())
    del columns, divided
    grad_bias = _aten.mul(_aten.ones_like(bias), _aten.sum(grad, [0, 2, 3]))
    return grad_image, grad_weight, grad_offset, grad_mask, grad_bias


STAND_INS: dict[str, Callable[..., Any]] = {
    "torchvision::nms": nms,
    "torchvision::deform_conv2d": deform_conv2d,
    "torchvision::_deform_conv2d_backward": deform_conv2d_backward,
}
"""The functions that run in place of operators; each takes the recorder and the operator's arguments."""


def _kernel(name: str, written: torch.Tensor, *read: torch.Tensor | None) -> None:
    """Record a kernel that allocates nothing."""
    with one_operation(f"torchvision::{name}", written, *read, written=(0,)):
        pass


def _parallel_images(count: int) -> int:
    """Return the greatest divisor of the number of images up to the most that are unfolded at once."""
    return next(each for each in range(min(count, _MOST_PARALLEL_IMAGES), 0, -1) if count % each == 0)


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    zeros: torch.Tensor = _aten.zeros(list(shape), dtype=like.dtype, device=torch.device("meta"))
    return zeros


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else _aten.clone(tensor, memory_format=torch.contiguous_format)
