"""Matrix products: cuBLAS, batched and grouped.

A kernel computes the result tile by tile. With fewer tiles than multiprocessors, or a few more than a multiple of them,
some multiprocessors idle (wave quantisation); a result that is not a multiple of the tile wastes its edge (tile
quantisation). cuBLAS chooses among many tiles and splits the depth where the result is small; here the fastest choice
counts. Constants: ``catalog/efficiency.yaml``.

Besides arithmetic, two things bound a product: memory, which the operands cross once, and the multiprocessors' loading
of them (instructions and the L2 cache), which grows with their number and clock. Kernels for TF32 and for rows that are
not aligned load too slowly to saturate the memory of an H200; on a GPU of slower memory they take hardly longer.

The constants are Hopper's, which the points of its calibrations refine. Architectures of which others published the
times of many products have constants of their own (``catalog/products.yaml``): their kernels are other ones.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import ceil, log2
from typing import NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import HALVES, NOTHING, Chip, KernelWork, constants, number, passes_to
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SIDES = (64, 96, 128, 160, 192, 256)
_LARGEST_TILE = 36864
"""192 x 192: the fp32 accumulators that fit in the registers of two warp groups."""
_TILES = {
    "half": tuple((a, b) for a in _SIDES if a != 160 for b in _SIDES if a * b <= _LARGEST_TILE),
    "tf32": ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256), (64, 256), (256, 64)),
    "fp32": ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256), (32, 128), (32, 32), (128, 32)),
}
_TILES["half_misaligned"] = _TILES["half_odd"] = (*_TILES["tf32"], (64, 32), (32, 64), (32, 32))
_TILES["tf32_misaligned"] = _TILES["tf32"]
OWN_TILES = {"half": _TILES["tf32"]}
"""Tiles of kernels that were written for no architecture in particular."""
_LEAST_DEPTH = 128
"""Smallest depth of one part of a split product."""
_ALIGNED, _HALF_ALIGNED = 16, 4
"""Alignment of rows in bytes for tensor cores' fastest kernels, and for the next class."""


_OUTER, _BLOCK, _WARP = (64, 32), 128, 32
"""Sizes of a tile of products of two vectors; threads of a block, one for each result, and of a warp."""
_GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities for which ``_grouped_mm`` has a kernel."""


class ProductConstants(NamedTuple):
    """Constants of a kind of product, as in ``catalog/efficiency.yaml``."""

    peak: float
    border: float
    start_seconds: float
    lead: float
    split_seconds: float
    traffic: float


class Speed(NamedTuple):
    """A GPU as far as products depend on it; ``issue_rate`` as in ``Chip``."""

    rate: float
    processors: int
    bandwidth: float
    issue_rate: float

    def memory(self) -> float:
        """Return the bytes a second that the best kernels read from memory."""
        return self.bandwidth * constants("loading").memory

    def loading(self, form: ProductConstants) -> float:
        """Return the bytes a second that the multiprocessors load."""
        return form.traffic * constants("loading").bandwidth * self.issue_rate / constants("loading").issue_rate


class ProductSizes(NamedTuple):
    """The sizes of ``batch`` products of m x k with k x n."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements of all factors and results."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def features(self) -> tuple[float, ...]:
        """What points of a calibration are compared by."""
        return tuple(map(log2, self))


class Kernels(NamedTuple):
    """The kernels of a kind of product: their constants, and the rows and columns of their tiles."""

    constants: ProductConstants
    tiles: tuple[tuple[int, int], ...]


class OwnProducts(NamedTuple):
    """The kernels of an architecture, and the GPU on which the products were timed that they were fitted to."""

    kernels: Kernels
    gpu: str


def matmul(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``mm``, ``bmm``, ``addmm``, ``baddbmm`` and ``addbmm``, also with ``out``."""
    operands = operands_of(call)
    a, b = operands[-2:]
    if len(a.shape) < 2 or len(b.shape) < 2 or a.on_host:
        return vector_product(call, chip)
    batch = a.shape[0] if len(a.shape) == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    if not batch * m * n * k:
        return NOTHING
    if a.dtype == "float32" and batch >= chip.multiprocessors and 1 in (m, n, k):
        return _many_vectors(call, chip, a, b)
    kind = kind_of(chip, a, b, *call.outputs[:1])
    layout = ("n" if a.strides[-1] == 1 else "t") + ("n" if b.strides[-1] == 1 else "t")
    form = "batched" if len(a.shape) == 3 else "plain"
    work = product(chip, kind, a.dtype, ProductSizes(batch, m, n, k), f"{form}.{layout}", own=True)
    return work._replace(
        family=f"{work.family}.{'added' if len(operands) > 2 else 'alone'}",
        passes=passes_to(call, work.bytes, "dense factors and result, without the added matrix"),
    )


def _many_vectors(call: Call, chip: Chip, a: Array, b: Array) -> KernelWork:
    """Return the work of many products of a matrix with a vector, or of two vectors, in fp32 whatever is allowed.

    cuBLAS takes a block of threads for each matrix (``gemv2N``, ``gemvx``), which adds up columns one after the other,
    or rows, by where neighbours lie; of two vectors it computes a tile at a time.
    """
    form: dict[str, float] = read_yaml("efficiency.yaml")["many_vectors"]
    batch, (m, k), n = a.shape[0], a.shape[1:], b.shape[2]
    if k == 1:
        way, each = "outer", ceil(m / _OUTER[0]) * ceil(n / _OUTER[1]) * form["tile_seconds"]
    else:
        results, together = (m, a.strides[2] == 1) if n == 1 else (n, b.strides[1] == 1)
        rows = results * ceil(k / _WARP) * form["row_seconds"]
        columns = ceil(results / _BLOCK) * k * form["column_seconds"]
        way, each = ("rows", rows) if together else ("columns", columns)
    moved = sum(tensor.bytes for tensor in (a, b, *call.outputs))
    moving = moved / (chip.bandwidth * read_yaml("efficiency.yaml")["loading"]["memory"])
    sizes = ProductSizes(batch, m, n, k)
    by_tiles = product(chip._replace(tf32=False), "fp32", a.dtype, sizes, "batched.nn").seconds
    seconds = min(form["start_seconds"] + max(moving, batch * each / chip.multiprocessors), by_tiles)
    passes = passes_to(call, moved, "dense factors and result, without the added matrix")
    return KernelWork(f"many vectors.{way}", sizes.features, sizes.flop, "fp32", moved, 1, seconds, passes)


def operands_of(call: Call) -> tuple[Array, ...]:
    """Return what a product reads: a matrix to add, if there is one, then the factors; not what ``out`` names."""
    return call.inputs[:-1] if len(call.inputs) - 1 in call.written else call.inputs


def product(
    chip: Chip,
    kind: str,
    dtype: str,
    sizes: ProductSizes,
    form: str,
    *,
    stored: int | None = None,
    own: bool = False,
) -> KernelWork:
    """Return the work of products of matrices.

    Args:
        chip: The GPU.
        kind: The family of kernels (``kind_of``).
        dtype: The type of the factors.
        sizes: The number of products, and the sizes of the matrices.
        form: Of the name of the family: plain, batched or grouped, and which factors are transposed (``plain.nt``).
        stored: Bytes of the operands in memory where they are fewer than those of the matrices: an implicit product
            reads a pixel once from memory for all places of the kernel.
        own: By the constants of the GPU's own architecture, where there are any.
    """
    size = 2 if dtype in HALVES else 8 if dtype == "float64" else 4
    moved = sizes.elements * size
    rate = chip.precision(dtype)
    memory = min(moved, stored) if stored is not None else moved
    speed = Speed(float(chip.rate(rate)), chip.multiprocessors, chip.bandwidth, chip.issue_rate)
    known = products_of(chip.capability, kind) if own else None
    kernels = Kernels(constants_of(kind), _TILES[kind]) if known is None else known.kernels
    seconds = seconds_of(kernels, speed, memory, size, sizes)
    family = f"matmul.{kind}.{form}"
    return KernelWork(family, sizes.features, sizes.flop, rate, moved, 1, seconds, own_products=known is not None)


def kind_of(chip: Chip, *tensors: Array) -> str:
    """Return the family of kernels that multiplies: by type and, on tensor cores, by the alignment of rows."""
    dtype = tensors[0].dtype
    name = "half" if dtype in HALVES else "tf32" if chip.precision(dtype) == "tf32" else "fp32"
    if name == "fp32" or _aligned(tensors, _ALIGNED):
        return name
    return f"{name}_misaligned" if name == "tf32" or _aligned(tensors, _HALF_ALIGNED) else f"{name}_odd"


def _aligned(tensors: tuple[Array, ...], to: int) -> bool:
    return all(stride * t.itemsize % to == 0 for t in tensors for stride in t.strides if stride > 1)


@lru_cache(maxsize=65536)
def seconds_of(kernels: Kernels, speed: Speed, memory: int, size: int, sizes: ProductSizes) -> float:
    """Return the time of the fastest tile and split, but no less than memory and loading take.

    Args:
        kernels: The kernels that cuBLAS chooses from.
        speed: The GPU.
        memory: Bytes that cross the memory bus.
        size: Bytes of an element.
        sizes: The products.
    """
    form, (batch, m, n, k) = kernels.constants, sizes
    loading = speed.loading(form)
    least = max(memory / speed.memory(), sizes.elements * size / loading)
    partial = min(speed.memory(), loading)
    best = float("inf")
    for rows, columns in kernels.tiles:
        if best <= least:  # which memory and loading take anyway
            break
        share = form.peak / (1 + form.border * (1 / rows + 1 / columns)) * speed.rate / speed.processors
        tiles = ceil(m / rows) * ceil(n / columns) * batch
        for split in _SPLITS:
            if split > 1 and k < _LEAST_DEPTH * split:
                break
            waves = ceil(tiles * split / speed.processors)
            seconds = waves * 2 * rows * columns * (ceil(k / split) + form.lead) / share
            if split > 1:
                seconds += form.split_seconds + 8.0 * split * batch * m * n / (2 * partial)
            best = min(best, seconds)
    return form.start_seconds + max(best, least)


@cache
def constants_of(kind: str) -> ProductConstants:
    """Return the constants of a kind of product."""
    return ProductConstants(**read_yaml("efficiency.yaml")["matmul"][kind])


@cache
def products_of(capability: tuple[int, int], kind: str) -> OwnProducts | None:
    """Return the kernels of an architecture for a kind of product; None where nobody published enough times."""
    known = read_yaml("products.yaml")["architectures"].get("{}.{}".format(*capability), {})
    if kind not in known:
        return None
    kernels = Kernels(ProductConstants(**known[kind]["constants"]), OWN_TILES[kind])
    return OwnProducts(kernels, known[kind]["gpu"])


def vector_product(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``mv``, ``dot``, ``addmv``, which is bound by traffic."""
    moved = traffic(call).bytes
    return KernelWork("vector product", (log2(max(moved, 1) / chip.l2_bytes),), moved / 2.0, bytes=moved)


def grouped_matmul(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``_grouped_mm``: the experts' products in one kernel, after one that prepares it.

    That is so in bf16 on GPUs that have the kernel; else each group's product is a kernel of its own.  Groups of equal
    size are assumed.  Where ranks share the experts of a layer (``shared_by``), the rows of other ranks' experts lie
    behind the last group, and nothing is computed for them.

    Source: aten/src/ATen/native/cuda/GroupedBlas.cpp (``_grouped_mm_cuda``), aten/src/ATen/native/GroupedMMUtils.h.
    """
    a, b = call.inputs[:2]
    groups = groups_of(call)
    parts = groups * int(number(call, "shared_by", "1"))
    if len(a.shape) == 2 and len(b.shape) == 3:  # tokens are grouped
        batch, m, n, k = groups, ceil(a.shape[0] / parts), b.shape[-1], a.shape[1]
    elif len(a.shape) == 2:  # the summed dimension is grouped
        batch, m, n, k = groups, a.shape[0], b.shape[-1], ceil(a.shape[1] / parts)
    else:
        batch, m, n, k = a.shape[0], a.shape[1], b.shape[-1], a.shape[2]
    layout = ("n" if a.strides[-1] == 1 else "t") + ("n" if b.strides[-1] == 1 else "t")
    sizes = ProductSizes(batch, max(m, 1), n, max(k, 1))
    work = product(chip, kind_of(chip, a, b), a.dtype, sizes, f"grouped.{layout}")
    passes = passes_to(call, work.bytes, "dense factors and result, without the offsets")
    if is_grouped_kernel(call) and chip.capability[0] in _GROUPED_CAPABILITIES:
        form: dict[str, float] = read_yaml("efficiency.yaml")["grouped"]
        seconds = form["start_seconds"] + work.seconds * form["longer"]
        return work._replace(family=f"grouped.kernel.{layout}", launches=2, passes=passes, seconds=seconds)
    one = product(chip, kind_of(chip, a, b), a.dtype, sizes._replace(batch=1), f"grouped.{layout}")
    family = work.family.replace("matmul", "grouped")
    return work._replace(family=family, launches=batch + 1, passes=passes, seconds=batch * one.seconds)


def groups_of(call: Call) -> int:
    """Return the groups of ``_grouped_mm``: its offsets, or the matrices of an operand or of the result."""
    if len(call.inputs) > 2:
        return int(call.inputs[2].shape[0])
    cubes = [array for array in (*call.inputs[:2], *call.outputs) if len(array.shape) > 2]
    return int(cubes[0].shape[0]) if cubes else 1


def is_grouped_kernel(call: Call) -> bool:
    """Return whether ``_grouped_mm`` has a kernel for the types of a call."""
    return all(array.dtype == "bfloat16" for array in call.inputs[:2])
