"""Join a profile with the predicted operations, one by one.

The profiler sees a tree (``aten::linear`` calls ``aten::addmm``), the prediction the level below autograd.  Walking
down, the first node whose name is predicted is the operation, unless it holds another of its own name, to which it
passes on (autocast does, after it has cast the arguments); kernels above such nodes belong to nobody.  Both lists are
then aligned in order, by name and by the shapes of the tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trainatomy.analysis.operations import Profile
from trainatomy.measurement.profiler.profile import Profiled
from trainatomy.operators.counts import count
from trainatomy.results.operation_breakdown import Joined
from trainatomy.results.operations import Call, Operations

_MOST_EDITS = 1500
_Key = tuple[str, tuple[tuple[int, ...], ...]]
_FILL = "a fill"
_FILLS = "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ scalar_tensor arange"
_ALIKE = {
    **{f"aten::{name}": _FILL for name in _FILLS.split()},
    "aten::_index_put_impl_": "aten::index_put_",
    "aten::native_batch_norm": "aten::cudnn_batch_norm",
    "aten::native_batch_norm_backward": "aten::cudnn_batch_norm_backward",
}
"""What runs the same kernel under several names: the prediction takes another way to a fill than CUDA's composites do
(``new_ones`` for ``ones``), and a GPU hands batch norm to cuDNN."""


class _Measured(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float


def joined(operations: Operations, tree: Iterable[Profiled]) -> Profile:
    """GPU seconds for each operation that the profile has too (the mean of its repeats), and what found no partner."""
    works = [count(call) for call in operations.calls]
    lists = {call.name for call in operations.calls if call.lengths}
    order = [index for index in operations.unrolled() if works[operations.operations[index].call].kind in _SEEN]
    predicted = [_predicted_key(operations, index, lists) for index in order]
    names = {name for name, _ in predicted}
    measured = [row for root in tree for row in _walk(root, names)]
    found: dict[int, list[float]] = defaultdict(list)
    used: set[int] = set()
    known = [place for place, row in enumerate(measured) if _alike(row.name) in names]
    keys = [_key(measured[place].name, measured[place].shapes, lists) for place in known]
    for place, other in _pairs(predicted, keys):
        found[order[place]].append(measured[known[other]].seconds)
        used.add(known[other])
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


def _predicted_key(operations: Operations, index: int, lists: set[str]) -> _Key:
    call = operations.calls[operations.operations[index].call]
    name = "aten::fill_" if _fills_from_host(call) else call.name
    return _key(name, tuple(array.shape for array in call.inputs), lists)


def _fills_from_host(call: Call) -> bool:
    """Whether a copy is of one number of the host, which a GPU's step fills in (``tensor[:, 0] = number``)."""
    source = call.inputs[-1] if call.name == "aten::copy_" else None
    return source is not None and source.on_host and not any(source.strides) and not call.inputs[0].on_host


def _alike(name: str) -> str:
    return _ALIKE.get(name, name)


def _key(name: str, shapes: tuple[tuple[int, ...], ...], lists: set[str]) -> _Key:
    """Numbers and tensors without dimensions look alike to the profiler, lists have no shapes, and of fills some are
    told the shape as numbers."""
    name = _alike(name)
    return name, () if name in lists or name == _FILL else tuple(shape for shape in shapes if shape)


def _walk(node: Profiled, names: set[str]) -> Iterator[_Measured]:
    if _alike(node.name) in names and not _holds(node, node.name):
        yield _Measured(node.name, node.shapes, node.whole_seconds)
        return
    if node.seconds:
        yield _Measured(node.name, node.shapes, node.seconds)
    for child in node.children:
        yield from _walk(child, names)


def _holds(node: Profiled, name: str) -> bool:
    return any(child.name == name or _holds(child, name) for child in node.children)


def _pairs(first: list[_Key], second: list[_Key]) -> Iterator[tuple[int, int]]:
    """Positions that belong together: equal by name and shapes in the longest common subsequence; in a gap between, by
    name, where both sides have a name equally often."""
    i = j = 0
    for a, b in [*_common(first, second), (len(first), len(second))]:
        there = _by_name(second, j, b)
        for name, places in _by_name(first, i, a).items():
            if len(places) == len(there.get(name, ())):
                yield from zip(places, there[name], strict=True)
        if a < len(first) and b < len(second):
            yield a, b
        i, j = a + 1, b + 1


def _by_name(keys: list[_Key], start: int, end: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for place in range(start, end):
        found[keys[place][0]].append(place)
    return found


def _common(first: list[_Key], second: list[_Key]) -> list[tuple[int, int]]:
    """Pairs of the longest common subsequence, by the greedy algorithm of Myers ("An O(ND) Difference Algorithm and Its
    Variations", 1986): quick where the lists are nearly the same, and it knows no preference for long stretches, which
    in a step that repeats itself layer by layer may lie in different layers.

    Given up at ``_MOST_EDITS`` differences, with what was found up to there.
    """
    reach, course = {1: 0}, []
    for edits in range(min(len(first) + len(second), _MOST_EDITS) + 1):
        course.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            i = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            while i < len(first) and i - diagonal < len(second) and first[i] == second[i - diagonal]:
                i += 1
            reach[diagonal] = i
            if i >= len(first) and i - diagonal >= len(second):
                return _traced(course, i, i - diagonal)
    diagonal = max(reach, key=lambda k: 2 * reach[k] - k)
    return _traced(course, reach[diagonal], reach[diagonal] - diagonal)


def _traced(course: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    """The pairs on the way back from (i, j)."""
    pairs = []
    for edits in range(len(course) - 1, -1, -1):
        reach, diagonal = course[edits], i - j
        down = diagonal == -edits or (diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1))
        before = diagonal + 1 if down else diagonal - 1
        start = reach[before]
        begin = start if down else start + 1
        while i > begin and edits:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        if not edits:
            pairs += [(place, place) for place in range(i - 1, -1, -1)]
            break
        i, j = start, start - before
    return pairs[::-1]
