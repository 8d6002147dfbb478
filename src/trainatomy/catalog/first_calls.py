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
    known = _known()

    def kinds(of: Iterable[Call]) -> set[tuple[str, object, object]]:
        return {
            (call.name, tuple((array.shape, array.strides) for array in call.inputs), call.numbers)
            for call in of
            if call.name in known
        }

    return sum(known[name] for name, *_ in kinds(calls) - kinds(before))


def first_evaluation_seconds(calls: Iterable[Call], before: Iterable[Call] = ()) -> float:
    """Return the seconds that the first evaluation of a process takes longer, by its calls and those of the step."""
    return _known()["first_evaluation"] + first_call_seconds(calls, before)


def first_on_machine_seconds(first_evaluation: float) -> float:
    """Return what a first evaluation takes even longer on a machine on which no process has run one.

    ``first_evaluation``: what it takes longer anyway, by which it is known whether it plans attention of cuDNN.
    """
    known = _known()
    return known["first_on_machine"] if first_evaluation > known["first_evaluation"] else 0.0


def _known() -> dict[str, float]:
    return cast("dict[str, float]", read_yaml("first_calls.yaml"))
