"""The plans by which cuDNN computes a convolution: an engine for each product, its settings, the parts of its sums.

Neighbouring shapes may be computed by different engines, or by the same one with their sums unsplit, which takes up to
twenty times as long.  Where cuDNN's library is installed, the simulation asks it, and a call says its plans; so do the
points of the shipped calibrations (benchmarks/cudnn/group_ways.py label).  Points of the same plan are then nearer to a
call than sizes alone say.  Where one of them does not say its plans, sizes alone decide.

Of 7,961 convolutions in 553 trainings on an H200, each priced without the points of its own shape, the mean error of
the logarithm falls from 0.113 to 0.097, and the trainings whose convolutions are off by more than 12 % from 72 to 39
(benchmarks/timing/plan_distances.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log2
from typing import NamedTuple

from trainatomy.catalog.gpus import has_recorded_engines
from trainatomy.results.operations import Call

ARGUMENT = "plans"
"""The name under which a call says its plans, with commas between: those of the products that it computes, in order."""
_CAPABILITY = (9, 0)
"""Compute capability of the GPUs that were calibrated."""
_OTHER_ENGINE, _OTHER_SETTING, _SPLIT = 4.0, 2.0, 0.25
"""Squared distances of another engine, another setting, and a doubling of the parts; chosen by leaving points out."""


class Plan(NamedTuple):
    """How one product is computed.

    Attributes:
        engine: Number of cuDNN's engine.
        setting: Checksum of its other knobs, such as the size of tiles, as three hexadecimal digits.
        parts: Parts that it splits sums into.
    """

    engine: int
    setting: str = ""
    parts: int = 1

    def __str__(self) -> str:
        own = f"{self.engine}~{self.setting}" if self.setting else str(self.engine)
        return f"{own}/{self.parts}" if self.parts > 1 else own


def plans_of(call: Call) -> tuple[Plan, ...]:
    """Return the plans that a call says, empty where it does not."""
    return parse_plans(dict(call.numbers).get(ARGUMENT, ""))


@cache
def parse_plans(text: str) -> tuple[Plan, ...]:
    """Return the plans that ``say`` wrote."""
    return tuple(map(_plan, text.split(","))) if text else ()


def _plan(text: str) -> Plan:
    own, _, parts = text.partition("/")
    engine, _, setting = own.partition("~")
    return Plan(int(engine), setting, int(parts or 1))


def names_engines(version: str, capability: tuple[int, int]) -> bool:
    """Return whether a version of cuDNN, such as 9.19.0, and a GPU have the engines that the shipped calibrations name.

    On GPUs of another architecture other engines run, so that sizes alone decide which points are near.
    """
    return capability == _CAPABILITY and has_recorded_engines(version)


def say(plans: Sequence[Plan]) -> str:
    """Return plans as a call says them."""
    return ",".join(map(str, plans))


def plan_distance(one: Sequence[Plan], other: Sequence[Plan]) -> float:
    """Return the squared distance of two calls by their plans, 0 where one of them is not known."""
    if not one or not other or one == other:
        return 0.0
    return sum(_distance(a, b) for a, b in zip(one, other, strict=False))


def _distance(one: Plan, other: Plan) -> float:
    if one.engine != other.engine:
        return _OTHER_ENGINE
    return _OTHER_SETTING * (one.setting != other.setting) + _SPLIT * log2(one.parts / other.parts) ** 2


def is_alike(one: Sequence[Plan], other: Sequence[Plan]) -> bool:
    """Return whether two calls have known plans, the same but for the parts, of which one has at most twice as many."""
    return bool(one and other) and all(
        a[:2] == b[:2] and max(a.parts, b.parts) <= 2 * min(a.parts, b.parts) for a, b in zip(one, other, strict=False)
    )
