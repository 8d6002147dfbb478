"""What kernels of a family reach of the data sheet where no calibration says more (``facts/efficiency.yaml``)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from trainatomy.catalog.files import read_yaml


class Reach(NamedTuple):
    """``kernel_seconds``: what a call of the family lasts that has next to nothing to do; ``share``: of the bandwidth,
    or of the peak where arithmetic bounds it."""

    kernel_seconds: float
    share: float


@cache
def reach_of(family: str) -> Reach:
    """Of the nearest family that is known: its own, or one that contains it."""
    known = read_yaml("efficiency.yaml")["families"]
    while family not in known:
        if not family:
            raise KeyError("efficiency.yaml: families has no entry for everything")
        family = family.rpartition(".")[0]
    kernel_us, share = known[family]
    return Reach(kernel_us * 1e-6, share)
