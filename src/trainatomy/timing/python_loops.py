"""Find loops written in Python: stretches in which one module launches the same operations again and again.

The CPU launches views, copies and the like sooner there than between a model's modules: the code of a turn is short,
so that its caches hold all of it.  A recurrence over the positions of a sequence is the usual case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import eq

from trainatomy.results.operations import Call, Operations

LONGEST_TURN = 24
"""Operations of a turn at most.  A layer of a model launches more, and so does a module that several layers share."""
LEAST_TURNS = 8
_PHASES = frozenset({"forward", "recompute"})


def in_python_loops(operations: Operations) -> list[bool]:
    """Return for each operation whether it belongs to a loop of a forward pass: to one of several equal turns in a row.

    Turns are equal if they launch the same operators on inputs and outputs of the same shapes and types, in the same
    module.
    """
    numbers: dict[object, int] = {}
    of_call = [_form(call, numbers) for call in operations.calls]
    forms = [
        # an operation of another phase equals no other
        _number((of_call[one.call], one.phase, one.module), numbers) if one.phase in _PHASES else -1 - place
        for place, one in enumerate(operations.operations)
    ]
    found = [False] * len(forms)
    for turn in range(1, LONGEST_TURN + 1):
        for begin, end in _equal_stretches(forms, turn):
            if end - begin >= (LEAST_TURNS - 1) * turn:
                found[begin : end + turn] = [True] * (end + turn - begin)
    return found


def _equal_stretches(forms: Sequence[int], turn: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of stretches in which each operation equals the one that is a turn later."""
    begin = end = 0
    for place in compress(count(), map(eq, forms, forms[turn:])):
        if place > end:
            if end > begin:
                yield begin, end
            begin = place
        end = place + 1
    if end > begin:
        yield begin, end


def _form(call: Call, numbers: dict[object, int]) -> int:
    arrays = tuple(tuple((one.shape, one.dtype, one.on_host) for one in part) for part in (call.inputs, call.outputs))
    return _number((call.name, arrays), numbers)


def _number(key: object, numbers: dict[object, int]) -> int:
    return numbers.setdefault(key, len(numbers))
