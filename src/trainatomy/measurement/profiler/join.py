"""Match the operations of a profile with the predicted ones, one by one.

The profiler sees a tree (``aten::linear`` calls ``aten::addmm``), the prediction the level below autograd.  Walking
down, the first node whose name is predicted is the operation, unless it contains another of its own name, which then is
(autocast calls the operator again after it has cast the arguments); kernels above such nodes match no operation.  Both
lists are then aligned in order, by name and by the shapes of the tensors.
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

_MAX_EDITS = 1500
_Key = tuple[str, tuple[tuple[int, ...], ...]]
_FILL = "a fill"
_FILLS = "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ scalar_tensor arange"
_CANONICAL = {
    **{f"aten::{name}": _FILL for name in _FILLS.split()},
    "aten::_index_put_impl_": "aten::index_put_",
    "aten::native_batch_norm": "aten::cudnn_batch_norm",
    "aten::native_batch_norm_backward": "aten::cudnn_batch_norm_backward",
}
"""Canonical names of operators that run the same kernel: the prediction reaches a fill by another path than CUDA's
composite operators (``new_ones`` for ``ones``), and a GPU computes batch norm with cuDNN."""


class _Measured(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float


def join(operations: Operations, tree: Iterable[Profiled]) -> Profile:
    """Return GPU seconds of each operation in the profile (mean of its repeats), and the unmatched calls."""
    kinds = [count(call).kind for call in operations.calls]
    lists = {call.name for call in operations.calls if call.lengths}
    order = [index for index in operations.unrolled() if kinds[operations.operations[index].call] in _PROFILED_KINDS]
    predicted = [_predicted_key(operations, index, lists) for index in order]
    names = {name for name, _ in predicted}
    measured = [row for root in tree for row in _walk(root, names)]
    found: dict[int, list[float]] = defaultdict(list)
    used: set[int] = set()
    known = [position for position, row in enumerate(measured) if _canonical(row.name) in names]
    keys = [_key(measured[position].name, measured[position].shapes, lists) for position in known]
    for position, other in _pairs(predicted, keys):
        found[order[position]].append(measured[known[other]].seconds)
        used.add(known[other])
    matched = sum(len(times) for times in found.values())
    seconds: list[float | None] = [None] * len(operations.operations)
    for index, times in found.items():
        seconds[index] = sum(times) / len(times)
    missing = Counter(operations.calls[operations.operations[index].call].name for index in order if index not in found)
    return Profile(
        seconds,
        Joined(
            matched,
            len(order),
            sum(measured[position].seconds for position in used),
            sum(row.seconds for row in measured),
            dict(missing.most_common()),
            dict(Counter(row.name for i, row in enumerate(measured) if i not in used and row.seconds).most_common()),
        ),
    )


_PROFILED_KINDS = frozenset({"kernel", "transfer", "read"})


def _predicted_key(operations: Operations, index: int, lists: set[str]) -> _Key:
    call = operations.calls[operations.operations[index].call]
    name = "aten::fill_" if _is_fill_from_cpu(call) else call.name
    return _key(name, tuple(array.shape for array in call.inputs), lists)


def _is_fill_from_cpu(call: Call) -> bool:
    """Return whether a copy is of one number on the CPU, which a real step fills in (``tensor[:, 0] = number``)."""
    source = call.inputs[-1] if call.name == "aten::copy_" else None
    return source is not None and source.on_host and not any(source.strides) and not call.inputs[0].on_host


def _canonical(name: str) -> str:
    return _CANONICAL.get(name, name)


def _key(name: str, shapes: tuple[tuple[int, ...], ...], lists: set[str]) -> _Key:
    """Return the name and shapes to match by.

    To the profiler numbers and 0-dimensional tensors look the same, lists have no shapes, and some fills receive the
    shape as numbers.
    """
    name = _canonical(name)
    return name, () if name in lists or name == _FILL else tuple(shape for shape in shapes if shape)


def _walk(node: Profiled, names: set[str]) -> Iterator[_Measured]:
    if _canonical(node.name) in names and not _contains(node, node.name):
        yield _Measured(node.name, node.shapes, node.total_seconds)
        return
    if node.seconds:
        yield _Measured(node.name, node.shapes, node.seconds)
    for child in node.children:
        yield from _walk(child, names)


def _contains(node: Profiled, name: str) -> bool:
    return any(child.name == name or _contains(child, name) for child in node.children)


def _pairs(first: list[_Key], second: list[_Key]) -> Iterator[tuple[int, int]]:
    """Yield matching positions.

    They are equal by name and shapes in the longest common subsequence; in the gaps between, by name, where both sides
    have a name equally often.
    """
    i = j = 0
    for a, b in [*_longest_common(first, second), (len(first), len(second))]:
        others = _by_name(second, j, b)
        for name, positions in _by_name(first, i, a).items():
            if len(positions) == len(others.get(name, ())):
                yield from zip(positions, others[name], strict=True)
        if a < len(first) and b < len(second):
            yield a, b
        i, j = a + 1, b + 1


def _by_name(keys: list[_Key], start: int, end: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for position in range(start, end):
        found[keys[position][0]].append(position)
    return found


def _longest_common(first: list[_Key], second: list[_Key]) -> list[tuple[int, int]]:
    """Return the index pairs of the longest common subsequence.

    Uses the greedy algorithm of Myers ("An O(ND) Difference Algorithm and Its Variations", 1986).  It is fast for
    nearly equal lists and does not prefer long runs, which in a step that repeats layer by layer may lie in different
    layers.  Stops at ``_MAX_EDITS`` differences and returns what it found up to there.
    """
    reach, history = {1: 0}, []
    for edits in range(min(len(first) + len(second), _MAX_EDITS) + 1):
        history.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            i = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            while i < len(first) and i - diagonal < len(second) and first[i] == second[i - diagonal]:
                i += 1
            reach[diagonal] = i
            if i >= len(first) and i - diagonal >= len(second):
                return _backtrack(history, i, i - diagonal)
    diagonal = max(reach, key=lambda k: 2 * reach[k] - k)
    return _backtrack(history, reach[diagonal], reach[diagonal] - diagonal)


def _backtrack(history: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    """Return the pairs on the path that ends at (i, j)."""
    pairs = []
    for edits in range(len(history) - 1, -1, -1):
        reach, diagonal = history[edits], i - j
        down = diagonal == -edits or (diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1))
        before = diagonal + 1 if down else diagonal - 1
        start = reach[before]
        begin = start if down else start + 1
        while i > begin and edits:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        if not edits:
            pairs += [(position, position) for position in range(i - 1, -1, -1)]
            break
        i, j = start, start - before
    return pairs[::-1]
