"""Shapes that waste the card: dimensions that tensor cores cannot take whole, and results that leave multiprocessors
idle.

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (deep learning performance documentation):

- Tensor cores are used best if m, n and k are multiples of 16 bytes (8 elements of 16 bits, 4 of TF32), on A100 of
  128 bytes (64 and 32), section "Tensor Core Requirements".  Taken for every card since (capability 8.0 and above).
- The result is cut into tiles; a tile that hangs over the edge is computed in full (tile quantisation), and tiles are
  done in waves of one for each multiprocessor, the last of which may be nearly empty (wave quantisation).  Tiles:
  256x128 to 64x64; the library takes which it likes, so the best of them is assumed: what is said is lost at least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from trainatomy.analysis.operation_table import Step, folded
from trainatomy.results.operation_breakdown import WastefulShape
from trainatomy.results.operations import Array, Call

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_BYTES_NEEDED, _BYTES_BEST = 16, 128
#: A product that does less of the step's FLOP than the first is not worth a line, nor one that uses more of the card
#: than the second.
LEAST_SHARE, WELL_USED = 0.001, 0.9


class Product(NamedTuple):
    """``batch`` products [m, k] x [k, n] of elements of ``itemsize`` bytes."""

    batch: int
    m: int
    n: int
    k: int
    itemsize: int


def product_of(call: Call) -> Product | None:
    """The product that a call of mm, addmm, bmm or baddbmm computes; ``None`` for other operators."""
    matrices = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
    places = matrices.get(call.name)
    if places is None:
        return None
    first, second = (call.inputs[place] for place in places)
    batch = first.shape[0] if len(first.shape) == 3 else 1
    return Product(batch, first.shape[-2], second.shape[-1], first.shape[-1], first.itemsize)


def wasteful_shapes(
    step: Step, capability: tuple[int, int], multiprocessors: int, tf32: bool = False
) -> tuple[WastefulShape, ...]:
    """Products on tensor cores (16-bit, and fp32 where ``tf32`` is allowed) that leave part of the card unused, by
    module (layers folded), those with the most FLOP first."""
    calls: dict[tuple[int, str, str], int] = defaultdict(int)
    for _, operation, work in step.kernels():
        if work.group == "contraction":
            calls[operation.call, folded(operation.module), operation.phase] += operation.repeats
    whole = step.total().flop or 1
    found: list[WastefulShape] = []
    for (index, module, phase), count in calls.items():
        call = step.operations.calls[index]
        product = product_of(call)
        if product is None or not _on_tensor_cores(call, capability, tf32):
            continue
        share = (call.flop or 0) * count / whole
        if share >= LEAST_SHARE:
            base = WastefulShape(
                "", call.name, module, phase, count, (product.batch, *product[1:4]), "", 0, 0, 0, 1.0, share
            )
            found += [*_alignment(product, base, capability), *_quantisation(product, base, multiprocessors)]
    return tuple(sorted(_merged(found), key=lambda shape: -shape.flop_share * (1.05 - shape.used)))


def _on_tensor_cores(call: Call, capability: tuple[int, int], tf32: bool) -> bool:
    dtype = call.inputs[0].dtype
    if dtype == "float16":
        return capability >= (7, 0)
    return (dtype == "bfloat16" or (dtype == "float32" and tf32)) and capability >= (8, 0)


def _alignment(product: Product, base: WastefulShape, capability: tuple[int, int]) -> Iterator[WastefulShape]:
    needed = _BYTES_NEEDED // product.itemsize
    best = (_BYTES_BEST if capability >= (8, 0) else _BYTES_NEEDED) // product.itemsize
    for name, size in zip("mnk", product[1:4], strict=True):
        if size % best:
            multiple = needed if size % needed else best
            padded = _up(size, multiple)
            kind = "alignment" if size % needed else "best alignment"
            yield replace(
                base, kind=kind, dimension=name, size=size, multiple=multiple, padded=padded, used=size / padded
            )


def _quantisation(product: Product, base: WastefulShape, multiprocessors: int) -> Iterator[WastefulShape]:
    used, tile = max((_used(product, tile, multiprocessors), tile) for tile in TILES)
    if used >= WELL_USED:
        return
    tiles = _tiles(product, tile)
    full = _up(tiles, multiprocessors)
    inside = product.batch * product.m * product.n / (tiles * tile[0] * tile[1])
    kind = "waves" if tiles / full <= inside else "tiles"
    dimension = f"{tile[0]}x{tile[1]}"
    yield replace(base, kind=kind, dimension=dimension, size=tiles, multiple=multiprocessors, padded=full, used=used)


def _tiles(product: Product, tile: tuple[int, int]) -> int:
    return product.batch * -(-product.m // tile[0]) * -(-product.n // tile[1])


def _used(product: Product, tile: tuple[int, int], multiprocessors: int) -> float:
    """Share of what the card computes in whole waves of tiles that is part of the result."""
    computed = _up(_tiles(product, tile), multiprocessors) * tile[0] * tile[1]
    return product.batch * product.m * product.n / computed


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _merged(shapes: list[WastefulShape]) -> list[WastefulShape]:
    """Calls that differ in nothing that is shown (addresses, strides) as one line."""
    found: dict[WastefulShape, WastefulShape] = {}
    for shape in shapes:
        key = replace(shape, calls=0, flop_share=0.0)
        known = found.get(key)
        found[key] = (
            shape
            if known is None
            else replace(known, calls=known.calls + shape.calls, flop_share=known.flop_share + shape.flop_share)
        )
    return list(found.values())


def with_gains(
    shapes: tuple[WastefulShape, ...], step: Step, price: Callable[[Call], float]
) -> tuple[WastefulShape, ...]:
    """The same with ``gain_seconds`` where a dimension can be padded, the largest gain first: ``price`` gives the GPU
    seconds of a call (the clock's)."""
    by_shape = calls_by_shape(step)
    priced = [_with_gain(shape, by_shape.get((shape.operation, shape.shape)), price) for shape in shapes]
    return tuple(sorted(priced, key=lambda shape: -(shape.gain_seconds or 0.0)))


def calls_by_shape(step: Step) -> dict[tuple[str, tuple[int, int, int, int]], Call]:
    """A product of each operator and shape (batch, m, n, k), as ``WastefulShape`` names them; where several differ in
    types or strides, the last."""
    found = {}
    for call in step.operations.calls:
        product = product_of(call)
        if product is not None:
            found[call.name, (product.batch, *product[1:4])] = call
    return found


def _with_gain(shape: WastefulShape, call: Call | None, price: Callable[[Call], float]) -> WastefulShape:
    if call is None or shape.dimension not in ("m", "n", "k"):
        return shape
    saved = price(call) - price(padded_call(call, shape.dimension, shape.padded))
    return replace(shape, gain_seconds=saved * shape.calls)


def padded_call(call: Call, dimension: str, size: int) -> Call:
    """The same product with one dimension of another size; its strides as the shapes have them, in the same order.

    Raises ``ValueError`` for a call that is no product of matrices."""
    product = product_of(call)
    if product is None:
        raise ValueError(f"{call.name} is no product of two matrices whose dimensions have names")
    bias = call.name in ("aten::addmm", "aten::baddbmm")
    sizes = {**product._asdict(), dimension: size}
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    shapes = [(m, k), (k, n)]
    inputs = [_resized(array, shape) for array, shape in zip(call.inputs[bias:], shapes, strict=True)]
    if bias:
        first = call.inputs[0]
        inputs.insert(0, _resized(first, (m, n)) if len(first.shape) > 1 else first._replace(shape=(n,)))
    outputs = tuple(_resized(array, (m, n)) for array in call.outputs)
    flop = 2 * product.batch * m * n * k
    return call._replace(inputs=tuple(inputs), outputs=outputs, flop=flop)


def _resized(array: Array, matrix: tuple[int, int]) -> Array:
    """Of a matrix (or a batch of them), dense, and transposed as before."""
    rows, columns = matrix
    transposed = array.strides[-2] == 1 and array.strides[-1] != 1
    last = (1, rows) if transposed else (columns, 1)
    batch = array.shape[:-2]
    strides = (rows * columns, *last) if batch else last
    return array._replace(shape=(*batch, rows, columns), strides=strides)
