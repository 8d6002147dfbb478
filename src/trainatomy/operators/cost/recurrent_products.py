"""The products of a recurrent layer, [rows, depth] times [depth, columns], alone and beside others.

They are that of a time step, whose rows are the samples, and that of the inputs for some steps at a time, or of the
gradients of the inputs.  Their tiles walk over the depth at once, if there are as many multiprocessors, each as fast as
it loads its operands, and slower the more of them load.  Which of cuBLAS' kernels run, and whether these split the
depth, is not known: the fastest of several sizes of tiles gives an estimate, and the times of products that were
measured correct it where they are alike (within a factor of about 1.5).

Data: ``catalog/efficiency.yaml`` (form), ``catalog/recurrent_products.csv`` (times of products in networks on an
H200, and on an H100 less what they take longer there; cuDNN 9.19; ``benchmarks/timing/recurrent_points.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from math import ceil, exp, gcd, log, log2, sqrt
from typing import NamedTuple

from trainatomy.catalog.files import read_text, read_yaml
from trainatomy.lookup import mean_of_nearest

TILES = ((32, 32), (64, 64), (64, 128), (128, 128), (128, 256))
MEASURED_MULTIPROCESSORS = 132
"""Multiprocessors of the GPUs that were measured."""
_BLEND = 3
"""Power by which the time of one tile and that of all tiles at once are blended."""
_NEAREST, _SOFTENING, _UNCHANGED = 5, 0.1, 2.0
"""Measured products that count; what is added to squared distances in doublings; weight of the estimate as it is."""
_LINE_BYTES = 128
"""Bytes of a line of the cache: what begins between lines is read in more pieces."""
_SIDES = 1.4
"""Weight of doublings of columns and depth, those of rows (in whole tiles) being 1: they decide how depth is split."""
_BESIDE = 2.0
"""Weight of squared doublings of the kernels that run at a time."""


class RecurrentProduct(NamedTuple):
    """A product of a recurrent layer.

    Attributes:
        kind: How it multiplies, as in ``catalog/efficiency.yaml``.
        role: ``forward`` or ``backward``: of a time step; ``inputs forward`` or ``inputs backward``: of the inputs.
        rows: Samples, or those of all time steps that are multiplied at once.
        columns: Columns of its result.
        depth: Numbers that each result adds up.
    """

    kind: str
    role: str
    rows: int
    columns: int
    depth: int

    @property
    def unevenness(self) -> float:
        """Return how many times the alignment of the weights' rows in memory halves a line of the cache."""
        width = (self.depth if self.role.endswith("forward") else self.columns) * (4 if "32" in self.kind else 2)
        return log2(_LINE_BYTES / gcd(width, _LINE_BYTES))


class _Measured(NamedTuple):
    """A measured product: logarithms of its sizes and of the kernels at a time, and of its time over the estimate."""

    place: tuple[float, ...]
    ratio: float


def recurrent_product_seconds(one: RecurrentProduct, at_a_time: float, multiprocessors: int) -> float:
    """Return the time of a product while so many kernels run at a time."""
    place = _place_of(one, at_a_time)
    near = sorted(
        (sum((a - b) ** 2 for a, b in zip(each.place, place, strict=True)), each.ratio) for each in _known(one)
    )
    ratio = mean_of_nearest(near[:_NEAREST], _SOFTENING, prior_weight=_UNCHANGED)
    return estimate(one, _form_of(one), at_a_time, multiprocessors) * exp(ratio)


def estimate(one: RecurrentProduct, form: Sequence[float], at_a_time: float, multiprocessors: int) -> float:
    """Return the time of a product by its form, as in ``catalog/efficiency.yaml``."""
    start, each, crowded, together, uneven, *longer = form
    busy = at_a_time**together * crowded
    fastest = min(
        ratio * _waves(ceil(one.rows / rows) * ceil(one.columns / columns), busy, multiprocessors)
        for (rows, columns), ratio in zip(TILES, (1.0, *longer), strict=False)
    )
    return float(start * 1e-6 + one.depth * each * 1e-9 * (1 + uneven * one.unevenness) * fastest)


def _form_of(one: RecurrentProduct) -> Sequence[float]:
    form: Sequence[float] = read_yaml("efficiency.yaml")["recurrent"]["product"][one.kind][one.role]
    return form


def _waves(tiles: int, busy: float, multiprocessors: int) -> float:
    """Return the time of tiles of one size, in times of a tile alone."""
    loading = min(tiles / multiprocessors, 1) * busy
    return float(ceil(tiles / multiprocessors) * (1 + loading**_BLEND) ** (1 / _BLEND))


def _place_of(one: RecurrentProduct, at_a_time: float) -> tuple[float, ...]:
    beside = sqrt(_BESIDE) * log2(max(at_a_time, 1.0))
    rows = ceil(one.rows / TILES[0][0]) * TILES[0][0]
    return log2(max(rows, 1)), _SIDES * log2(max(one.columns, 1)), _SIDES * log2(max(one.depth, 1)), beside


def _known(one: RecurrentProduct) -> list[_Measured]:
    return _measured().get((one.kind, one.role), [])


@cache
def _measured() -> dict[tuple[str, str], list[_Measured]]:
    """Return the measured products by kind and role."""
    found = defaultdict(list)
    for line in read_text("recurrent_products.csv").splitlines():
        if line.startswith("#"):
            continue
        kind, role, rows, columns, depth, at_a_time, microseconds = line.split(",")
        one, beside = RecurrentProduct(kind, role, int(rows), int(columns), int(depth)), float(at_a_time)
        ratio = log(float(microseconds) * 1e-6 / estimate(one, _form_of(one), beside, MEASURED_MULTIPROCESSORS))
        found[kind, role].append(_Measured(_place_of(one, beside), ratio))
    return found
