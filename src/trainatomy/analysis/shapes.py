"""Shapes that waste the GPU, and the settings to change so that they do not.

Find matrix products whose shapes waste the GPU: misaligned dimensions, and results that leave multiprocessors idle.

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (deep learning performance documentation):

- Tensor cores are used best if m, n and k are multiples of 16 bytes (8 elements of 16 bits, 4 of TF32), on A100 of
  128 bytes (64 and 32), section "Tensor Core Requirements".  Assumed for every GPU since (capability 8.0 and above).
- The result is cut into tiles.  A tile that extends beyond the edge is computed in full (tile quantisation), and tiles
  are computed in waves of one per multiprocessor, the last of which may be nearly empty (wave quantisation).  The
  library chooses among tiles from 256x128 to 64x64; the best one is assumed, so the loss reported is a lower bound.

Find the setting to change so that a dimension suits tensor cores, and predict what its products gain.

A dimension is traced to a setting of the same size: the vocabulary (rows of an embedding table), the length of a
sample (alone, or times the batch: the rows of most products), a width in the model's configuration, or the batch size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trainatomy.analysis.memory import fold_layers
from trainatomy.analysis.operation_table import OperationTable
from trainatomy.catalog.architectures import architecture
from trainatomy.results.operations import Array, Call, Padding, WastefulShape
from trainatomy.workload.train import TrainSpec

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_BYTES_NEEDED, _BYTES_BEST = 16, 128
MIN_FLOP_SHARE, WELL_USED = 0.001, 0.9
"""Products with a smaller share of the step's FLOP than the first, or that use more of the GPU than the second, are not
reported."""


class Product(NamedTuple):
    """A batch of matrix products [m, k] x [k, n]; ``itemsize``: bytes of an element."""

    batch: int
    m: int
    n: int
    k: int
    itemsize: int


def product_of(call: Call) -> Product | None:
    """Return the product that a call of mm, addmm, bmm or baddbmm computes, ``None`` for other operators."""
    matrices = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
    places = matrices.get(call.name)
    if places is None:
        return None
    first, second = (call.inputs[place] for place in places)
    batch = first.shape[0] if len(first.shape) == 3 else 1
    return Product(batch, first.shape[-2], second.shape[-1], first.shape[-1], first.itemsize)


def wasteful_shapes(
    table: OperationTable, capability: tuple[int, int], multiprocessors: int, tf32: bool = False
) -> tuple[WastefulShape, ...]:
    """Return the products on tensor cores that leave part of the GPU unused, by module, the most wasteful first.

    Args:
        table: The operations of a step.
        capability: Compute capability of the GPU.
        multiprocessors: Number of its multiprocessors.
        tf32: Whether fp32 products may use tensor cores, as 16-bit products do.
    """
    calls: dict[tuple[int, str, str], int] = defaultdict(int)
    for _, operation, work in table.kernels():
        if work.group == "contraction":
            calls[operation.call, fold_layers(operation.module, root=True), operation.phase] += operation.repeats
    whole = table.total().flop or 1
    found: list[WastefulShape] = []
    for (index, module, phase), count in calls.items():
        call = table.operations.calls[index]
        product = product_of(call)
        if product is None or not _on_tensor_cores(call, capability, tf32):
            continue
        share = (call.flop or 0) * count / whole
        if share >= MIN_FLOP_SHARE:
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
    """Return the share of the work done in whole waves of tiles that is part of the result."""
    computed = _up(_tiles(product, tile), multiprocessors) * tile[0] * tile[1]
    return product.batch * product.m * product.n / computed


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _merged(shapes: list[WastefulShape]) -> list[WastefulShape]:
    """Merge calls that differ only in addresses or strides, which are not shown."""
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
    shapes: tuple[WastefulShape, ...], table: OperationTable, gpu_seconds: Callable[[Call], float]
) -> tuple[WastefulShape, ...]:
    """Add ``gain_seconds`` to the shapes with a dimension that can be padded, and sort by it.

    Args:
        shapes: The shapes.
        table: The operations they are from.
        gpu_seconds: Predicts the GPU seconds of a call.
    """
    by_shape = calls_by_shape(table)
    found = [_with_gain(shape, by_shape.get((shape.operation, shape.shape)), gpu_seconds) for shape in shapes]
    return tuple(sorted(found, key=lambda shape: -(shape.gain_seconds or 0.0)))


def calls_by_shape(table: OperationTable) -> dict[tuple[str, tuple[int, int, int, int]], Call]:
    """Return a call of each operator and shape (batch, m, n, k), as in ``WastefulShape``.

    If several differ only in types or strides, it is the last of them.
    """
    found = {}
    for call in table.operations.calls:
        product = product_of(call)
        if product is not None:
            found[call.name, (product.batch, *product[1:4])] = call
    return found


def _with_gain(shape: WastefulShape, call: Call | None, gpu_seconds: Callable[[Call], float]) -> WastefulShape:
    if call is None or shape.dimension not in ("m", "n", "k"):
        return shape
    saved = gpu_seconds(call) - gpu_seconds(padded_call(call, shape.dimension, shape.padded))
    return replace(shape, gain_seconds=saved * shape.calls)


def padded_call(call: Call, dimension: str, size: int) -> Call:
    """Return the product with another size of ``dimension`` (m, n or k), its matrices dense and in the same layout.

    Raises:
        ValueError: If the call is not a matrix product.
    """
    product = product_of(call)
    if product is None:
        raise ValueError(f"{call.name} is not a product of two matrices with dimensions m, n and k")
    bias = call.name in ("aten::addmm", "aten::baddbmm")
    sizes = {**product._asdict(), dimension: size}
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    written = len(call.inputs) - bias - 2  # torch.mm(a, b, out=c) names its output last
    shapes = [(m, n)] * bias + [(m, k), (k, n)] + [(m, n)] * written
    inputs = [_resized(array, shape) for array, shape in zip(call.inputs, shapes, strict=True)]
    outputs = tuple(_resized(array, (m, n)) for array in call.outputs)
    flop = 2 * product.batch * m * n * k
    return call._replace(inputs=tuple(inputs), outputs=outputs, flop=flop)


def _resized(array: Array, matrix: tuple[int, int]) -> Array:
    """Return the array with matrices of another shape: dense, and transposed if they were; or a row for a bias."""
    if len(array.shape) == 1:
        return array._replace(shape=matrix[1:])
    rows, columns = matrix
    transposed = array.strides[-2] == 1 and array.strides[-1] != 1
    last = (1, rows) if transposed else (columns, 1)
    batch = array.shape[:-2]
    strides = (rows * columns, *last) if batch else last
    return array._replace(shape=(*batch, rows, columns), strides=strides)


_NEEDED, _BEST = "alignment", "best alignment"
_WIDTHS = (
    "hidden_size n_embd d_model dim hidden_dim intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim "
    "moe_intermediate_size head_dim d_kv".split()
)
_PREFER_LARGER = 0.95
"""A larger multiple is preferred if it gains at least this share of the best gain: cuBLAS benefits from it more than
the timing model knows."""


class _Role(NamedTuple):
    """A setting that decides a dimension: ``factor`` times the ``value`` of the setting ``key``.

    ``kind``: vocab, length, width or batch.
    """

    key: str
    value: int
    kind: str
    factor: int = 1


def paddings(
    shapes: Sequence[WastefulShape],
    table: OperationTable,
    workload: Mapping[str, Any],
    gpu_seconds: Callable[[Call], float] | None = None,
) -> tuple[Padding, ...]:
    """Suggest a padded size for each misaligned size among ``shapes``, the largest gain first.

    Args:
        shapes: The wasteful shapes of the step.
        table: The step's operations.
        workload: The description, whose settings are searched for the sizes.
        gpu_seconds: Predicts the GPU seconds of a call; suggestions that gain nothing are left out.
    """
    calls = calls_by_shape(table)
    roles = list(_roles(workload, table))
    by_size: dict[int, list[WastefulShape]] = defaultdict(list)
    for shape in shapes:
        if shape.kind in (_NEEDED, _BEST):
            by_size[shape.size].append(shape)
    found = []
    for size, rows in by_size.items():
        role = next((role for role in roles if role.value * role.factor == size), None)
        choices = [_padding(size, rows, role, multiple, calls, gpu_seconds) for multiple in _multiples(rows)]
        most = max(choice.gain_seconds or 0.0 for choice in choices)
        if gpu_seconds is None or most > 0:
            found.append([choice for choice in choices if (choice.gain_seconds or 0.0) >= _PREFER_LARGER * most][-1])
    return tuple(sorted(found, key=lambda one: (-(one.gain_seconds or 0.0), -one.products)))


def _padding(
    size: int,
    rows: Sequence[WastefulShape],
    role: _Role | None,
    multiple: int,
    calls: Mapping[tuple[str, tuple[int, int, int, int]], Call],
    gpu_seconds: Callable[[Call], float] | None,
) -> Padding:
    value, factor = (role.value, role.factor) if role is not None else (size, 1)
    padded = -(-value // multiple) * multiple
    gain = None
    if gpu_seconds is not None:
        gain = 0.0
        for row in rows:
            call = calls[row.operation, row.shape]
            gain += (gpu_seconds(call) - gpu_seconds(padded_call(call, row.dimension, padded * factor))) * row.calls
    modules = tuple(dict.fromkeys(row.module for row in rows))
    return Padding(
        size,
        padded * factor,
        multiple,
        sum(row.calls for row in rows),
        modules,
        role.key if role is not None else "",
        value,
        padded,
        role.kind if role is not None else "",
        factor,
        gain,
    )


def _multiples(rows: Sequence[WastefulShape]) -> list[int]:
    """Return the multiples to try: the required one, and the best one for every row that misses the required one."""
    return sorted({row.multiple for row in rows} | {8 * row.multiple for row in rows if row.kind == _NEEDED})


def _roles(workload: Mapping[str, Any], table: OperationTable) -> Iterator[_Role]:
    """Yield the settings that decide dimensions, the most specific first."""
    model, data, train = (workload.get(section) or {} for section in ("model", "data", "train"))
    for call in table.operations.calls:
        if call.name == "aten::embedding":
            yield _Role("" if model.get("factory") else "model.config.vocab_size", call.inputs[0].shape[0], "vocab")
    sized_by = "per_device_train_batch_size"
    if workload.get("mode", "training") != "training" and train.get("per_device_eval_batch_size"):
        sized_by = "per_device_eval_batch_size"
    batch = train.get(sized_by) or TrainSpec().per_device_train_batch_size
    for key in ("sequence_length", "target_length"):
        if data.get(key):
            yield _Role(f"data.{key}", data[key], "length")
            yield _Role(f"data.{key}", data[key], "length", batch)
    known = architecture(str(model.get("id") or ""))
    config = {**(known.config if known is not None else {}), **(model.get("config") or {})}
    for key in _WIDTHS:
        if isinstance(config.get(key), int):
            yield _Role(f"model.config.{key}", config[key], "width")
    yield _Role(f"train.{sized_by}", batch, "batch")
