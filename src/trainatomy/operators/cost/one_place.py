"""Convolutions of images of one place, as in the squeeze-and-excitation blocks of RegNet, EfficientNet and MobileNetV3.

They are small products of [images, channels], whose rows begin at the channels, not at the places: they are aligned if
the channels are, and no layout is changed.  What they take is the depth of one product, which cuDNN divides among more
multiprocessors the deeper it is (up to three kernels).  Channels that do not fill loads of 16 bytes were not measured,
and are priced as other products, as are 16 bits, whose points are among these.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import HALVES, Chip
from trainatomy.results.operations import Array

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
