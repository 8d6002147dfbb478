"""Write the engines that are missing without a driver to src/trainatomy/catalog/cudnn_plans.json.

python benchmarks/cudnn/missing_engines.py [--half 0] [--out FILE]                          (with cuDNN's library)

The library is asked, without a GPU, for the first plans of each call that an H200's handle was asked for. Where the
engine that the GPU runs is not the one that is named first, it is missing. ``--half`` keeps half of the calls, by hash
of their shapes, and prints how often the table is right about the other half.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from network_calls import HERE, as_convolution

from trainatomy.catalog.cudnn import device_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation.cudnn.heuristics import Heuristics
from trainatomy.operators.allocation.cudnn.library import cudnn_library
from trainatomy.operators.allocation.cudnn.missing import FILE, NAMED, group_of, keys_of

OUT = HERE.parents[1] / "src" / "trainatomy" / "catalog" / FILE
ANSWERS = (
    ("cases/calls.jsonl.gz", "records/answers-h200.jsonl.gz"),
    ("held_out/calls.jsonl.gz", "held_out/records/answers-h200.jsonl.gz"),
    ("records/drawn.jsonl.gz", "records/answers-drawn-h200.jsonl.gz"),
)
"""Calls, and the plan of each by the handle."""
LISTS = ("records/plans-h200.jsonl.gz",)
"""Calls with all of their plans by the handle."""
TRACED = "held_out/traced.jsonl"
"""Calls whose engine is known by the bytes that it took in the trace of a training."""
METHODS = {
    "forward": {"58": "cuBLAS", "5": "direct", "3": "FFT", "6": "Winograd of 16 images"},
    "input gradient": {"63": "cuBLAS", "6": "direct", "7": "Winograd of 16 images", "50": "FFT of tiles"},
    "weight gradient": {
        "62": "cuBLAS", "16": "sums of images", "19": "direct", "17": "Winograd", "18": "FFT",
    },
}  # fmt: skip
"""What the engines do that are missing, and the workspace is computed by."""
FEWEST = 12
"""Products that must agree before the first plan alone tells the engine; types count apart."""
SOURCE = (
    "What an H200 ran (cuDNN 9.19.0, torch 2.11) for calls whose first plans without a driver are these; "
    "0: the first of them. benchmarks/cudnn/missing_engines.py"
)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a compressed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def answered() -> Iterator[tuple[dict[str, Any], int]]:
    """Yield calls and the engine that an H200 runs."""
    for calls, answers in ANSWERS:
        every = lines(HERE / calls)
        for answer in lines(HERE / answers):
            if "engine" in answer:
                yield every[answer["number"]], answer["engine"]
    for text in (HERE / TRACED).read_text(encoding="utf-8").splitlines():
        call = json.loads(text)
        yield call, call["engine"]
    for name in LISTS:
        for line in lines(HERE / name):
            if line.get("plans"):
                yield line, line["plans"][0][0]


def half_of(call: Mapping[str, Any]) -> int:
    """Return 0 or 1, by the shapes of a call: those of other types and operations fall on the same side."""
    shapes = json.dumps([call[name] for name in ("data", "weight", "strides", "padding")])
    return int(hashlib.md5(shapes.encode()).hexdigest(), 16) % 2


Row = tuple[str, str, tuple[str, ...]]
"""Operation, group, and the first plans."""
Asked = tuple[str, str, tuple[str, ...], int, int]
"""Operation, group, first plans, the engine that is missing or ``NAMED``, half."""


def asked() -> Iterator[Asked]:
    """Yield each call once, with the plans that the library names without a GPU."""
    text = device_text(find_gpu("h200"))
    assert text is not None
    heuristics, seen = Heuristics(cudnn_library(), text), set()
    for call, engine in answered():
        one = as_convolution(call)
        group = group_of(one)
        if group is None or (call["kind"], one.key) in seen:
            continue
        seen.add((call["kind"], one.key))
        plan = heuristics.plan(call["kind"], one, tf32=True, deterministic=False)
        if plan is not None and plan.listed and not plan.last:
            yield call["kind"], group, plan.listed, NAMED if plan.engine == engine else engine, half_of(call)


def table_of(calls: Iterable[Asked]) -> dict[Row, int]:
    """Return the engine by operation, group and the fewest plans that tell it.

    One plan tells it for products only, two or three for all. Of other convolutions, those of which nothing is missing
    are left out.
    """
    engines: dict[Row, set[int]] = defaultdict(set)
    calls_of: dict[Row, int] = defaultdict(int)
    by_call = [(engine, [(kind, group, key) for key in keys_of(listed)]) for kind, group, listed, engine, _ in calls]
    for engine, rows in by_call:
        for row in rows:
            engines[row].add(engine)
            calls_of[row] += 1
    table = {}
    for engine, rows in by_call:
        telling = (row for row in rows if len(engines[row]) == 1 and _is_enough(row, calls_of[row]))
        told = next(telling, None)
        if told is not None and (engine != NAMED or not is_usually_named(told[1])):
            table[told] = engine
    return table


def _is_enough(row: Row, calls: int) -> bool:
    """Return whether the plans of a row may tell the engine: two or more, or one that many products agree about."""
    return len(row[2]) > 1 or (row[1].startswith("product") and calls >= FEWEST)


def is_usually_named(group: str) -> bool:
    """Return whether the plan that is named runs where the table says nothing."""
    return group.startswith(("other", "groups"))


def check(calls: Iterable[Asked], table: Mapping[Row, int]) -> None:
    """Print how many of the calls the table knows, and about how many it is right."""
    known: dict[tuple[str, str], list[bool]] = defaultdict(list)
    total: dict[tuple[str, str], int] = defaultdict(int)
    for kind, group, listed, engine, _ in calls:
        total[kind, group] += 1
        found = next((table[kind, group, key] for key in keys_of(listed) if (kind, group, key) in table), None)
        if found is not None or is_usually_named(group):
            known[kind, group].append((found or NAMED) == engine)
    for key, count in sorted(total.items()):
        right = sum(known[key])
        print(*key, f"{count} calls, {len(known[key])} known, {right} right", sep="; ")


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", type=int, choices=(0, 1), help="make the table of this half and check the other")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    calls = list(asked())
    made = [call for call in calls if options.half is None or call[4] == options.half]
    table = table_of(made)
    if options.half is not None:
        check([call for call in calls if call[4] != options.half], table)
        return 0
    plans: dict[str, dict[str, dict[str, int]]] = {kind: {} for kind in METHODS}
    for (kind, group, named), engine in sorted(table.items()):
        plans[kind].setdefault(group, {})[" | ".join(named)] = engine
    contents = {"source": SOURCE, "methods": METHODS, "plans": plans}
    options.out.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    print(f"{len(table)} lists of plans of {len(calls)} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
