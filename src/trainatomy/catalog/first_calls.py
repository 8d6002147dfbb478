"""What the first call of an operator with new shapes costs the host, from ``first_calls.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from trainatomy.catalog.files import read_yaml
from trainatomy.results.operations import Call


def first_call_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return the seconds that calls take longer when their shapes have not occurred, except in the calls ``before``.

    cuDNN keeps a plan for each shape, order in memory and setting: forward with the sums that backward needs and
    without them are two plans (``MHAParams`` in aten/src/ATen/native/cudnn/MHA.cpp).
    """
    known = cast("dict[str, float]", read_yaml("first_calls.yaml"))

    def kinds(of: Iterable[Call]) -> set[tuple[str, object, object]]:
        return {
            (call.name, tuple((array.shape, array.strides) for array in call.inputs), call.numbers)
            for call in of
            if call.name in known
        }

    return sum(known[name] for name, *_ in kinds(calls) - kinds(before))


def first_on_machine_seconds() -> float:
    """Return what the first attention of cuDNN without gradients takes longer on a machine that has never run one."""
    return cast("dict[str, float]", read_yaml("first_calls.yaml"))["first_on_machine"]
