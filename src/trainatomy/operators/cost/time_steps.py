"""The product of a recurrent layer's time step, [batch, depth] times [depth, columns], alone and beside others.

Its tiles walk over the depth at once, if there are as many multiprocessors, each as fast as it loads its operands, and
slower the more of them load.  Which of cuBLAS' kernels run is not known: the fastest of several sizes of tiles gives an
estimate, and the times of products that were measured correct it where they are alike (within a factor of about 1.5).

Data: ``catalog/efficiency.yaml`` (form), ``catalog/time_steps.csv`` (times of products in networks on an H200, cuDNN
9.19; ``benchmarks/timing/recurrent_layers.py``).
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import ceil, exp, log, log2, sqrt
from typing import NamedTuple

from trainatomy.catalog.files import read_text, read_yaml

_TILES = ((32, 32), (64, 64), (64, 128))
_H200 = 132
"""Multiprocessors of the GPU that was measured."""
_BLEND = 3
"""Power by which the time of one tile and that of all tiles at once are blended."""
_NEAREST, _SOFTENING, _UNCHANGED = 5, 0.1, 2.0
"""Measured products that count; what is added to squared distances in doublings; weight of the estimate as it is."""
_BESIDE = 2.0
"""Weight of squared doublings of the kernels that run at a time.  With it the measured products, each estimated from
those of other sizes, are met within 5.6 % in the median instead of 6.4 %."""


class TimeStep(NamedTuple):
    """The product of a time step.

    Attributes:
        kind: How it multiplies, as in ``catalog/efficiency.yaml``.
        pass_name: ``forward`` or ``backward``.
        batch: Samples.
        columns: Columns of its result.
        depth: Numbers that each result adds up.
    """

    kind: str
    pass_name: str
    batch: int
    columns: int
    depth: int


class _Measured(NamedTuple):
    """A measured product: logarithms of its sizes and of the kernels at a time, and of its time over the estimate."""

    place: tuple[float, ...]
    ratio: float


def time_step_seconds(step: TimeStep, at_a_time: float, multiprocessors: int) -> float:
    """Return the time of a product while so many kernels run at a time."""
    place = _place_of(step, at_a_time)
    near = sorted((sum((a - b) ** 2 for a, b in zip(one.place, place, strict=True)), one.ratio) for one in _known(step))
    weights = [(1 / (distance + _SOFTENING) ** 2, ratio) for distance, ratio in near[:_NEAREST]]
    whole = sum(weight for weight, _ in weights) + _UNCHANGED
    return _estimate(step, at_a_time, multiprocessors) * exp(sum(weight * ratio for weight, ratio in weights) / whole)


def _estimate(step: TimeStep, at_a_time: float, multiprocessors: int) -> float:
    start, each, crowded, together, *longer = read_yaml("efficiency.yaml")["recurrent"]["product"][step.kind][
        step.pass_name
    ]
    fastest = min(
        ratio
        * _waves(ceil(step.batch / rows) * ceil(step.columns / columns), at_a_time**together * crowded, multiprocessors)
        for (rows, columns), ratio in zip(_TILES, (1.0, *longer), strict=True)
    )
    return float(start * 1e-6 + step.depth * each * 1e-9 * fastest)


def _waves(tiles: int, busy: float, multiprocessors: int) -> float:
    """Return the time of tiles of one size, in times of a tile alone."""
    loading = min(tiles / multiprocessors, 1) * busy
    return float(ceil(tiles / multiprocessors) * (1 + loading**_BLEND) ** (1 / _BLEND))


def _place_of(step: TimeStep, at_a_time: float) -> tuple[float, ...]:
    beside = sqrt(_BESIDE) * log2(max(at_a_time, 1.0))
    return log2(max(step.batch, 1)), log2(max(step.columns, 1)), log2(max(step.depth, 1)), beside


def _known(step: TimeStep) -> list[_Measured]:
    return _measured().get((step.kind, step.pass_name), [])


@cache
def _measured() -> dict[tuple[str, str], list[_Measured]]:
    """Return the measured products by kind and pass."""
    found = defaultdict(list)
    for line in read_text("time_steps.csv").splitlines():
        if line.startswith("#"):
            continue
        kind, pass_name, batch, columns, depth, at_a_time, microseconds = line.split(",")
        step, beside = TimeStep(kind, pass_name, int(batch), int(columns), int(depth)), float(at_a_time)
        ratio = log(float(microseconds) * 1e-6 / _estimate(step, beside, _H200))
        found[kind, pass_name].append(_Measured(_place_of(step, beside), ratio))
    return found
