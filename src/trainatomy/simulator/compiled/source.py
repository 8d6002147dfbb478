"""What a kernel that Inductor wrote reads, writes and computes, from its source in Triton's language.

Source: torch 2.11-2.15, torch/_inductor/codegen/triton.py (``TritonKernel.codegen_kernel``).
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil, log2, prod
from typing import Any, NamedTuple

from torch import Tensor

_SIZE_NAME = re.compile(r"(?:x|y|z|r0_|r1_)numel")
_SIZE = re.compile(rf"^ +({_SIZE_NAME.pattern}) = (\d+)$", re.MULTILINE)
_PART = re.compile(r"^    (?:el)?if pid < .*:$", re.MULTILINE)
_ASSIGNED = re.compile(r"^( +)(?:tmp\d+(?:, )?)+ = (.*)$")
_LOAD = re.compile(r"tl\.load\((\w+) \+ (.*)")
_STORE = re.compile(r"tl\.store\((\w+) \+ (.*)")
_ATOMIC = re.compile(r"tl\.atomic_add\((\w+) \+ (.*)")
_OVER_ROW = re.compile(r"\br\d_\d+\b|\br\d?_?index\b")
_TEMPORARY = re.compile(r"\btmp\d+\b")
_REDUCTION = re.compile(
    r"tl\.(sum|max|min)\(|triton_helpers\.(max2|min2|any|promote_to_tensor|welford|online_softmax_reduce)"
)
_FLEX_SIZES = ("ZQ", "ZKV", "HQ", "Q_LEN", "KV_LEN", "GQA_SHARED_HEADS", "QK_HEAD_DIM", "V_HEAD_DIM")
_FLEX_SIZE = re.compile(rf"^    ({'|'.join(_FLEX_SIZES)})(?: : tl.constexpr)? = (\d+)$", re.MULTILINE)
_CLASSES = {
    "random": re.compile(r"tl\.rand|randn|randint64"),
    "trigonometric": re.compile(r"math\.(?:cos|sin)\(|libdevice\.(?:cos|sin)\("),
    "erf": re.compile(r"libdevice\.(?:erf|erfc|tanh|pow|asin|acos|atan2?|lgamma)\("),
    "softmax": re.compile(r"online_softmax_combine"),
    "welford": re.compile(r"welford_reduce|welford_combine"),
}
"""Operations that take a thread longer than an addition, by class."""


class Access(NamedTuple):
    """What a kernel does to the memory of one of its arguments.

    Attributes:
        over_rows: Loads or stores whose place depends on the reduced dimensions, or all where nothing is reduced.
        per_row: Those that a row has once.
        stores: True if it writes.
    """

    over_rows: int
    per_row: int
    stores: bool


class KernelSource(NamedTuple):
    """A kernel that Inductor wrote.

    Attributes:
        kind: ``pointwise``, ``reduction``, ``persistent_reduction`` or another of Inductor's heuristics.
        sizes: Sizes of the dimensions that it covers, by name; those that vary are arguments instead.
        names: Its arguments, without constants.
        accesses: What it does to each array, by argument; one that is read and written comes twice.
        instructions: Number of operations for each element, by class; ``plain`` are those of no class.
        parts: Kernels that it consists of, for lists of tensors; its blocks are shared out among them.
    """

    kind: str
    sizes: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    accesses: tuple[tuple[str, Access], ...]
    instructions: tuple[tuple[str, int], ...]
    parts: tuple[KernelSource, ...] = ()

    def extent(self, arguments: Sequence[object]) -> tuple[int, int]:
        """Return the product of the sizes that are not reduced, 0 where none is known, and that of those that are."""
        varying = {
            name: size
            for name, size in zip(self.names, arguments, strict=False)
            if _SIZE_NAME.fullmatch(name) and isinstance(size, int)
        }
        sizes = varying | dict(self.sizes)
        reduced = prod(size for name, size in sizes.items() if name.startswith("r"))
        return prod(sizes.values()) // reduced if sizes and reduced else 0, reduced

    def numbers(self, arguments: Sequence[object]) -> dict[str, Any]:
        """Return what its time depends on besides its traffic.

        A persistent reduction holds a row in registers, and computes as many elements as the next power of two has.
        """
        if self.parts:
            return {"kind": "pointwise", **_together([part.numbers(arguments) for part in self.parts])}
        rows, reduced = self.extent(arguments)
        row = 2 ** ceil(log2(reduced)) if self.kind.startswith("persistent") else reduced
        return {"kind": self.kind, "elements": rows * row, **dict(self.instructions)}

    def moved_bytes(self, arguments: Sequence[object]) -> int:
        """Return the bytes that it reads and writes of its arguments, each at most once."""
        if self.parts:
            return sum(part.moved_bytes(arguments) for part in self.parts)
        rows, reduced = self.extent(arguments)
        by_name = dict(zip(self.names, arguments, strict=False))
        moved = 0
        for name, access in self.accesses:
            tensor = by_name.get(name)
            if isinstance(tensor, Tensor):
                touched = access.over_rows * rows * reduced + access.per_row * rows
                moved += min(tensor.numel(), touched) * tensor.element_size()
        return moved


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the elements of all parts of a kernel, and the operations for each of them in the mean."""
    elements = sum(part["elements"] for part in parts)
    classes = dict.fromkeys(name for part in parts for name in part if name not in ("kind", "elements"))
    counts = {name: sum(part["elements"] * part.get(name, 0) for part in parts) for name in classes}
    return {"elements": elements, **{name: count / max(elements, 1) for name, count in counts.items()}}


def flex_shapes(source: str) -> list[tuple[int, ...]] | None:
    """Return the shapes of queries, keys and values of a kernel of FlexAttention; None where they vary.

    Source: torch 2.11-2.15, torch/_inductor/kernel/flex (flex_attention.py and templates).
    """
    sizes = {name: int(size) for name, size in _FLEX_SIZE.findall(source)}
    if len(sizes) < len(_FLEX_SIZES):
        return None
    heads = sizes["HQ"] // sizes["GQA_SHARED_HEADS"]
    return [
        (sizes["ZQ"], sizes["HQ"], sizes["Q_LEN"], sizes["QK_HEAD_DIM"]),
        (sizes["ZKV"], heads, sizes["KV_LEN"], sizes["QK_HEAD_DIM"]),
        (sizes["ZKV"], heads, sizes["KV_LEN"], sizes["V_HEAD_DIM"]),
    ]


@cache
def read_source(source: str) -> KernelSource:
    """Return what a kernel's source says."""
    kind = re.search(r"@triton_heuristics\.(\w+)\(", source)
    names, body = _arguments(source), source.partition("@triton.jit")[2]
    whole = _read(kind[1] if kind else "", names, body)
    parts = _PART.split(body)[1:]
    return whole._replace(parts=tuple(_read("pointwise", names, part) for part in parts))


def _read(kind: str, names: tuple[str, ...], body: str) -> KernelSource:
    """Return what the function of a kernel says, or a part of it."""
    sizes = {name: int(size) for name, size in _SIZE.findall(body) if size != "1" or not name.startswith("r")}
    reduces = any(name.startswith("r") and _SIZE_NAME.fullmatch(name) for name in (*sizes, *names))
    loads: Counter[tuple[str, bool, bool]] = Counter()
    instructions: Counter[str] = Counter()
    lines = body.splitlines()
    for line in lines:
        for pattern, stores in ((_LOAD, False), (_STORE, True), (_ATOMIC, True)):
            if (access := pattern.search(line)) is not None:
                over_row = not reduces or bool(_OVER_ROW.search(access[2].partition(", ")[0]))
                loads[access[1], stores, over_row] += 1
                if pattern is _ATOMIC:
                    loads[access[1], False, over_row] += 1
                    instructions["atomic"] += 1
    for line in _over_rows(lines) if reduces else lines:
        instructions[_class_of(line)] += 1
    arrays = dict.fromkeys((name, stores) for name, stores, _ in loads)
    return KernelSource(
        kind,
        tuple(sizes.items()),
        names,
        tuple((name, Access(loads[name, stores, True], loads[name, stores, False], stores)) for name, stores in arrays),
        tuple(sorted((name, count) for name, count in instructions.items() if name)),
    )


def _arguments(source: str) -> tuple[str, ...]:
    """Return the arguments that a launch passes; constants are in the code."""
    kernel = next((each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)), None)
    return tuple(each.arg for each in kernel.args.args if each.annotation is None) if kernel is not None else ()


def _over_rows(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a reduction that compute something for each element, not for each row."""
    per_row: set[str] = set()
    for line in lines:
        assigned = _ASSIGNED.match(line)
        if assigned is None:
            if any(_CLASSES[name].search(line) for name in ("softmax", "welford")):
                yield line
            continue
        targets = _TEMPORARY.findall(line[: line.index("=")])
        operands = set(_TEMPORARY.findall(assigned[2]))
        access = _LOAD.search(line)
        if access is not None:
            is_of_row = not _OVER_ROW.search(access[2].partition(", ")[0])
        elif _REDUCTION.search(line):
            per_row.update(targets)
            yield line
            continue
        else:
            is_of_row = operands <= per_row and not _OVER_ROW.search(line)
        if is_of_row:
            per_row.update(targets)
        else:
            yield line


def _class_of(line: str) -> str:
    """Return the class of the operation of a line; nothing where it computes nothing."""
    for name, pattern in _CLASSES.items():
        if pattern.search(line):
            return name
    assigned = _ASSIGNED.match(line)
    if assigned is None or assigned[2].startswith(("tl.full", "tl.broadcast_to", "tl.load", "tl.reshape")):
        return "load" if assigned is not None and "tl.load" in assigned[2] else ""
    return "plain" if _TEMPORARY.search(assigned[2]) else ""
