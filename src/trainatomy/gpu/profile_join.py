"""Join a profile with the predicted operations, one by one.

The profiler sees a tree (``aten::linear`` calls ``aten::addmm``), the prediction the level below autograd.  Walking
down, the first node whose name is predicted is the operation; kernels above such nodes belong to nobody.  Both lists
are then aligned in order, by name and by the shapes of the tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

from trainatomy.anatomy.anatomy import Profile
from trainatomy.anatomy.work import work_of
from trainatomy.gpu.profile import Profiled
from trainatomy.results.anatomy import Joined
from trainatomy.results.operations import Operations

_Key = tuple[str, tuple[tuple[int, ...], ...]]


class _Measured(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float


def joined(operations: Operations, tree: Iterable[Profiled]) -> Profile:
    """GPU seconds for each operation that the profile has too (the mean of its repeats), and what found no partner."""
    works = [work_of(call) for call in operations.calls]
    lists = {call.name for call in operations.calls if call.lengths}
    order = [index for index in _unrolled(operations) if works[operations.operations[index].call].kind in _SEEN]
    predicted = [_predicted_key(operations, index, lists) for index in order]
    names = {name for name, _ in predicted}
    measured = [row for root in tree for row in _walk(root, names)]
    found: dict[int, list[float]] = defaultdict(list)
    used: set[int] = set()
    for place, other in _pairs(predicted, [_key(row.name, row.shapes, lists) for row in measured]):
        found[order[place]].append(measured[other].seconds)
        used.add(other)
    matched = sum(len(times) for times in found.values())
    seconds: list[float | None] = [None] * len(operations.operations)
    for index, times in found.items():
        seconds[index] = sum(times) / len(times)
    missed = Counter(operations.calls[operations.operations[index].call].name for index in order if index not in found)
    return Profile(
        seconds,
        Joined(
            matched,
            len(order),
            sum(measured[place].seconds for place in used),
            sum(row.seconds for row in measured),
            dict(missed.most_common()),
            dict(Counter(row.name for i, row in enumerate(measured) if i not in used and row.seconds).most_common()),
        ),
    )


_SEEN = frozenset({"kernel", "transfer", "read"})


def _unrolled(operations: Operations) -> Iterator[int]:
    """Indices in the order of the real step: a micro-batch that stands for others as often as it runs."""
    rows = operations.operations
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and rows[end].repeats == rows[start].repeats and rows[start].repeats > 1:
            end += 1
        for _ in range(rows[start].repeats):
            yield from range(start, end)
        start = end


def _predicted_key(operations: Operations, index: int, lists: set[str]) -> _Key:
    call = operations.calls[operations.operations[index].call]
    return _key(call.name, tuple(array.shape for array in call.inputs), lists)


def _key(name: str, shapes: tuple[tuple[int, ...], ...], lists: set[str]) -> _Key:
    """Numbers and tensors without dimensions look alike to the profiler, and lists have no shapes."""
    return name, () if name in lists else tuple(shape for shape in shapes if shape)


def _walk(node: Profiled, names: set[str]) -> Iterator[_Measured]:
    if node.name in names:
        yield _Measured(node.name, node.shapes, node.whole_seconds)
        return
    if node.seconds:
        yield _Measured(node.name, node.shapes, node.seconds)
    for child in node.children:
        yield from _walk(child, names)


def _pairs(first: list[_Key], second: list[_Key]) -> Iterator[tuple[int, int]]:
    """Positions that belong together: equal by name and shapes, then, in the gaps between, by name alone."""
    for tag, a, a_end, b, b_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(range(a, a_end), range(b, b_end), strict=True)
        elif tag == "replace":
            names = [key[0] for key in first[a:a_end]], [key[0] for key in second[b:b_end]]
            for block in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
                yield from ((a + block.a + i, b + block.b + i) for i in range(block.size))
