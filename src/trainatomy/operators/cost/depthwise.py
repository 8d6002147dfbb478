"""Depthwise convolutions: PyTorch's own kernels and cuDNN's, by multiply-adds of each output.

Which kernels run, as kernel names on an H200 show (torch 2.11, cuDNN 9.19):

- *own*: channels-first tensors, by PyTorch (aten/src/ATen/native/cuda/DepthwiseConv2d.cu).  Forward and the gradient of
  the input have a thread for each number of the result, with unrolled loops for filters of 1 x 1, 3 x 3 and 5 x 5; in
  others each row of the filter costs index arithmetic.  Each number of the weight's gradient has a block of up to 256
  threads (32 for each image) that walk over all images and places.
- *shared*: channels-first fp16 in the sizes of ``is_of_cudnn``: cuDNN's kernels that keep a tile of the image in
  shared memory, or of a row (``conv1D_NCHW``).
- *last*: channels-last, by cuDNN (``conv2d_c1_k1_nhwc``).
- *many*: the same in 16 bits for eight images and more (``conv2d_c1_k1_nhwc_specialized``), up to three times as fast.
- *direct*: channels-last, dilated or of filters above 7 x 7; cuDNN has only its general grouped kernel for these
  (``conv2d_grouped_direct_kernel``), ten times as slow.  Places of the filter outside the image cost it nothing.

Channels-last gradients of the weight in fp32 are *direct* (``wgrad2d_grouped_direct_kernel``) for filters above 5 x 5
and for small images, too: 20 times as slow as cuDNN's others.  *products*, half as slow, compute those of large batches
of up to 256 channels, and in 16 bits all that are not *last*.

Convolutions of images of one place, as in the squeeze-and-excitation blocks of RegNet, EfficientNet and MobileNetV3.

They are small products of [images, channels], whose rows begin at the channels, not at the places: they are aligned if
the channels are, and no layout is changed.  What they take is the depth of one product, which cuDNN divides among more
multiprocessors the deeper it is (up to three kernels).  Channels that do not fill loads of 16 bytes were not measured,
and are priced as other products, as are 16 bits, whose points are among these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, log2, prod
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import HALVES, Chip, constants, geometry_of, number, whole_numbers
from trainatomy.results.operations import Array, Call

_SEQUENCE = 3
"""Dimensions of a batch of sequences."""
_BLOCK, _WARP, _H200 = 256, 32, 132
_UNROLLED = (1, 3, 5)
"""Sides of square filters that PyTorch's kernels have unrolled loops for."""
_EARLY = 9
"""Places of an unrolled filter that cost more than later ones, whose index arithmetic is shared."""
_AT_ONCE = 8
"""Blocks that a multiprocessor runs at a time."""
_NARROWEST, _WIDE, _WIDEST = 32, 256, 512
"""Channels from which on cuDNN runs fp16 convolutions that are channels-first."""
_MANY = 8
"""Images from which on cuDNN runs its faster kernel of channels-last convolutions in 16 bits."""
_LARGEST, _LARGEST_OF_WEIGHT = 7, 5
"""Largest side of a filter that cuDNN's channels-last kernels have, and those of the weight's gradient in fp32."""
_LEAST, _LEAST_OF_PRODUCTS, _MOST_OF_PRODUCTS = 2**18, 2**20, 256
"""Numbers of the least batch for cuDNN's fast gradient of the weight in fp32, and for products; their most channels."""


def is_of_cudnn(
    data: Sequence[int], weight: Sequence[int], strides: Sequence[int], dilation: Sequence[int], *, fp16: bool
) -> bool:
    """Return whether cuDNN runs a channels-first depthwise convolution, not PyTorch: some in fp16.

    Source: ``use_cudnn_depthwise`` in ATen/native/Convolution.cpp; sequences are images of one row there.
    """
    if not fp16 or max(dilation) > 1 or data[1] < _NARROWEST or len(data) > 4:
        return False
    batch, channels, width, is_row = data[0], data[1], data[-1], prod(data[2:-1]) == 1
    stride, side = strides[-1], weight[-1]
    if strides[0] != stride and not is_row:
        return False
    if is_row and stride == 1:
        return True
    if prod(weight[2:-1]) != side or side not in (1, 3, 5) or width < 7 or stride > 2:
        return False
    if stride == 1 or (side > 1 and batch == 1):
        return True
    if side == 1:
        return width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width <= 7
    return channels >= _WIDEST or (channels >= _WIDE and width >= 28)


def kind_of(call: Call, x: Array, weight: Array) -> str:
    """Return which kernels run forward: own, shared, last, many or direct; sequences are made contiguous first."""
    if len(x.shape) > _SEQUENCE and x.strides[1] == 1 and prod(x.shape[2:]) > 1:
        if _dilated(call) or max(weight.shape[2:]) > _LARGEST:
            return "direct"
        return "many" if x.dtype in HALVES and x.shape[0] >= _MANY else "last"
    strides, _, dilation = geometry_of(call, len(weight.shape) - 2)
    fp16 = x.dtype == "float16"
    return "shared" if is_of_cudnn(x.shape, weight.shape, strides, dilation, fp16=fp16) else "own"


def kind_of_weight(call: Call, x: Array, weight: Array) -> str:
    """Return which kernel computes the gradient of the weight: own, shared, last, direct or products."""
    kind = kind_of(call, x, weight)
    if x.dtype in HALVES:
        return {"many": "last", "direct": "products"}.get(kind, kind)
    if kind != "last":
        return kind
    if max(weight.shape[2:]) > _LARGEST_OF_WEIGHT:
        large = x.elements >= _LEAST_OF_PRODUCTS and x.shape[1] <= _MOST_OF_PRODUCTS
        return "products" if large else "direct"
    return "last" if x.elements >= _LEAST else "direct"


def depthwise(chip: Chip, call: Call, tensors: tuple[Array, Array, Array], mask: list[bool], backward: bool) -> float:
    """Return the time of a depthwise convolution without its bias.

    Args:
        chip: The GPU.
        call: ``convolution`` or ``convolution_backward``.
        tensors: Result (or its gradient), input and weight.
        mask: Whether input and weight get a gradient.
        backward: Whether it is the backward pass.
    """
    out, x, weight = tensors
    form, kind, places = constants("convolution", "depthwise"), kind_of(call, x, weight), prod(weight.shape[2:])
    rows, inside = _inside(call, out, x, weight)
    scale = 1e-9 * _H200 / chip.multiprocessors
    least = form.passes * (out.bytes + x.bytes) / chip.bandwidth
    if not backward:
        one = {
            "own": _own_result(weight, rows, inside),
            "shared": form.shared_output,
            "last": form.last_place * places,
            "many": form.many_place * places,
            "direct": form.direct_place * inside,
        }[kind]
        return form.kernel_seconds + max(out.elements * one * scale, least)
    seconds = 0.0
    if mask[0]:
        to_input = {
            "own": x.elements * _own_input(weight),
            "shared": out.elements * form.shared_output,
            "last": x.elements * form.last_backward_place * places,
            "many": x.elements * form.last_backward_place * places,
            "direct": x.elements * form.last_place * places,
        }[kind]
        seconds += form.kernel_seconds + max(to_input * scale, least)
    if mask[1]:
        products = form.products_half_place if x.dtype in HALVES else form.products_place
        to_weight = {
            "own": _own_weight(chip, out, weight),
            "shared": out.elements * form.shared_output * scale,
            "last": out.elements * form.last_backward_place * places * scale,
            "direct": out.elements * form.direct_weight_place * inside * scale,
            "products": out.elements * products * places * scale,
        }[kind_of_weight(call, x, weight)]
        seconds += form.kernel_seconds + max(to_weight, least)
    return seconds


def _inside(call: Call, out: Array, x: Array, weight: Array) -> tuple[float, float]:
    """Return the rows and the places of the filter that lie inside the image, on average over the result."""
    sides = weight.shape[2:], x.shape[2:], out.shape[2:]
    found = [_inside_of(*each) for each in zip(*sides, *geometry_of(call, len(weight.shape) - 2), strict=False)]
    return prod(found[:-1]), prod(found)


@cache
def _inside_of(side: int, image: int, count: int, step: int, pad: int, gap: int) -> float:
    """Return the same along one axis: of the filter's ``side``, for ``count`` numbers of the result."""
    first = (place * gap - pad for place in range(side))
    each = (min(count, ceil((image - begin) / step)) - max(0, ceil(-begin / step)) for begin in first)
    return sum(max(one, 0) for one in each) / max(count, 1)


def _is_unrolled(weight: Array) -> bool:
    """Return whether PyTorch's kernels have a loop for the filter whose length the compiler knows.

    Source: ``conv_depthwise2d_forward_out``; sequences are images of one row there.
    """
    sides = {*weight.shape[2:], *((1,) if len(weight.shape) == 3 else ())}
    return len(sides) == 1 and sides.issubset(_UNROLLED)


def _own_result(weight: Array, rows: float, inside: float) -> float:
    """Return the nanoseconds of one number of PyTorch's result, by what lies inside the image."""
    form = constants("convolution", "depthwise")
    if _is_unrolled(weight):
        return form.own_output + form.own_place * inside
    return form.own_loop_output + form.own_loop_row * rows + form.own_loop_place * inside


def _own_input(weight: Array) -> float:
    """Return the nanoseconds of one number of PyTorch's gradient of the input, by the places of the filter."""
    form, places = constants("convolution", "depthwise"), prod(weight.shape[2:])
    if not _is_unrolled(weight):
        rows = prod(weight.shape[2:-1])
        return form.own_loop_backward_output + form.own_loop_backward_row * rows + form.own_loop_backward_place * places
    early = min(places, _EARLY)
    return (
        form.own_backward_output
        + form.own_backward_place * early
        + form.own_backward_later_place * max(places - early, 0)
    )


def _own_weight(chip: Chip, out: Array, weight: Array) -> float:
    """Return the time of PyTorch's gradient of the weight: one block for each number of it, a warp for each image.

    A warp steps over the places of its images, 32 at a time.
    Source: ``conv_depthwise2d_grad_weight_kernel`` and ``getGradParamsNumThreads``.
    """
    form, most = constants("convolution", "depthwise"), _BLOCK // _WARP
    warps = min(out.shape[0], most)
    steps = ceil(out.shape[0] / warps) * ceil(prod(out.shape[2:]) / _WARP)
    blocks = weight.elements / chip.multiprocessors
    busy = form.own_block_seconds * blocks * warps / most
    step = max(form.own_step_seconds, form.own_turn_seconds + busy)
    return steps * step + form.own_start_seconds * ceil(blocks / _AT_ONCE)


def _dilated(call: Call) -> bool:
    return bool(set(whole_numbers(number(call, "dilation", "1"))) - {1})


_ALIGNED = 16
"""Bytes of a load of tensor cores' kernels."""


def is_of_one_place(out: Array, x: Array, weight: Array, groups: int) -> bool:
    """Return whether images, results and weight have one place, in 32 bits, and all channels meet in aligned rows."""
    if x.dtype in HALVES or any(tensor.shape[1] * tensor.itemsize % _ALIGNED for tensor in (out, x)):
        return False
    return groups == 1 and all(prod(tensor.shape[2:]) == 1 for tensor in (out, x, weight))


def one_place_seconds(
    x: Array, weight: Array, mask: list[bool], *, backward: bool, transposed: bool
) -> tuple[float, int]:
    """Return the time and the number of kernels of the result, or of those gradients that are computed.

    Args:
        x: The images.
        weight: The weight, whose first dimension are the results' channels unless it is transposed.
        mask: Which of input, weight and bias get a gradient; in forward, whether there is a bias.
        backward: Whether gradients are computed.
        transposed: Whether it is a transposed convolution.
    """
    form = _form()["backward" if backward else "forward"]
    results = weight.shape[1] if transposed else weight.shape[0]
    doublings = max(log2(max(results if backward else x.shape[1], 1) / _form()["from_depth"]), 0.0)
    deep = doublings * form["doubling_seconds"]
    if not backward:
        return form["product_seconds"] + deep + form["bias_seconds"] * mask[2], 1 + mask[2]
    seconds = form["product_seconds"] * sum(mask[:2]) + deep * mask[0] + form["bias_seconds"] * mask[2]
    return seconds, sum(mask)


def least_seconds(chip: Chip, flop: float, rate: str, moved: float) -> float:
    """Return the time of the arithmetic at its peak rate, or of the traffic, for very many images or channels."""
    return max(flop / chip.rate(rate), moved / chip.bandwidth)


def _form() -> dict[str, Any]:
    form: dict[str, Any] = read_yaml("efficiency.yaml")["convolution"]["one_place"]
    return form
