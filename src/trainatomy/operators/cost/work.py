"""What a call asks of a GPU, before any price: arithmetic, traffic, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainatomy.results.operations import Array, Call

HALVES = frozenset({"float16", "bfloat16"})


class Chip(NamedTuple):
    """The card, as far as the cost of a kernel depends on it. ``rates``: peak FLOP per second by precision;
    ``bandwidth``: bytes per second of the data sheet; ``tf32``: fp32 matrix products may use tensor cores;
    ``cudnn_tf32``: fp32 convolutions may (PyTorch's default)."""

    capability: tuple[int, int]
    multiprocessors: int
    bandwidth: float
    l2_bytes: int
    rates: Mapping[str, float]
    tf32: bool = False
    cudnn_tf32: bool = True

    def rate(self, precision: str) -> float:
        """Peak of a precision, or that of fp32 where the card lacks it (bf16 before Ampere)."""
        return self.rates.get(precision, self.rates["fp32"])

    def precision(self, dtype: str, tf32: bool | None = None) -> str:
        """The key of ``rates`` for matrix arithmetic on numbers of a type."""
        if dtype in ("float16", "bfloat16"):
            return "fp16" if dtype == "float16" else "bf16"
        if dtype == "float32" and (self.tf32 if tf32 is None else tf32) and "tf32" in self.rates:
            return "tf32"
        return "fp64" if dtype == "float64" else "fp8" if dtype.startswith("float8") else "fp32"


class Work(NamedTuple):
    """``family``: dotted, from the general to the special: what a measured efficiency is looked up by, with
    ``features`` (logarithms to base 2) that say how alike two calls are.

    ``seconds``: what kernels of this form take by physics alone, longer than ``flop`` at the peak ``rate`` or ``bytes``
    at the card's bandwidth; 0 where these two and the kernels' floor say it all. ``launches``: kernels, copies, fills.
    """

    family: str
    features: tuple[float, ...] = ()
    flop: float = 0.0
    rate: str = "fp32"
    bytes: float = 0.0
    launches: int = 1
    seconds: float = 0.0


NOTHING = Work("nothing", launches=0)
"""A call for which no kernel runs."""


def distinct(tensor: Array) -> int:
    """Bytes of the numbers that a tensor really has: an expanded dimension is stored once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.strides, strict=False):
        if stride or size == 0:
            count *= size
    return count * tensor.itemsize


def on_device(tensors: tuple[Array, ...]) -> list[Array]:
    """Those that lie in the card's memory."""
    return [tensor for tensor in tensors if not tensor.on_host]


def read_bytes(call: Call, without: frozenset[int] = frozenset()) -> int:
    """Each distinct input once, parts of one tensor each for itself; ``without``: positions that are not read."""
    seen = {
        (tensor.storage, tensor.part, tensor.shape, tensor.strides): distinct(tensor)
        for position, tensor in enumerate(call.inputs)
        if not tensor.on_host and position not in without
    }
    return sum(seen.values())


def written_bytes(call: Call) -> int:
    """Each output once, and each input that is written to."""
    places = {call.inputs[position].storage for position in call.written if position < len(call.inputs)}
    kept = sum(distinct(call.inputs[position]) for position in call.written if not call.inputs[position].on_host)
    return kept + sum(distinct(t) for t in call.outputs if not t.on_host and t.storage not in places)


def number(call: Call, name: str, default: str = "") -> str:
    """An argument that is no tensor, as text."""
    return next((value for key, value in call.numbers if key == name), default)


def whole_numbers(text: str) -> list[int]:
    """The numbers of a text such as ``[1, 2]``."""
    return [int(part) for part in text.strip("[]() ").replace(" ", "").split(",") if part.lstrip("-").isdigit()]


def largest(tensors: tuple[Array, ...]) -> Array | None:
    """The one with the most numbers, of those on the device."""
    return max(on_device(tensors), key=lambda tensor: tensor.elements, default=None)
