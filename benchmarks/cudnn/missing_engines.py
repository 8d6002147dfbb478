"""Write the engines that are missing without a driver to src/trainatomy/catalog/cudnn_plans.json.

python benchmarks/cudnn/missing_engines.py [--lists FOLDER] [--check]                       (with cuDNN's library)

The library is asked, without a GPU, for the first plans of each call that an H200's handle was asked for. Where the
engine that the GPU runs is not the one that is named first, it is missing. The lists of drawn calls may be asked for
before (``handle_answers.py --sources driverless --of records/answers-published-h200.jsonl.gz``) and read from a folder.

``--check`` makes the table without the configurations that are held out, and prints how often it is right about them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from handle_answers import Call, answers_in, calls, calls_of
from network_calls import HERE, as_convolution

from trainatomy.catalog.cudnn import device_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.heuristics import LISTED, Heuristics
from trainatomy.operators.allocation.cudnn.library import cudnn_library
from trainatomy.operators.allocation.cudnn.missing import (
    FILE,
    NAMED,
    SIZES,
    Engine,
    Row,
    engine_of,
    group_of,
    keys_of,
    missing_workspace,
)

OUT = HERE.parents[1] / "src" / "trainatomy" / "catalog" / FILE
ANSWERS = (
    ("cases/calls.jsonl.gz", "records/answers-h200.jsonl.gz"),
    ("held_out/calls.jsonl.gz", "held_out/records/answers-h200.jsonl.gz"),
    ("records/drawn.jsonl.gz", "records/answers-drawn-h200.jsonl.gz"),
    ("records/timed.jsonl.gz", "records/answers-timed-h200.jsonl.gz"),
)
"""Calls, and the plan of each by the handle."""
TWENTY = HERE / "records" / "layers-of-twenty.jsonl.gz"
"""Layers of trainings of the twenty networks at drawn batches and images."""
DRAWN: dict[str, Callable[[Mapping[str, Any]], list[Call]]] = {
    "records/answers-published-h200.jsonl.gz": lambda about: calls(about["count"], about["seed"]),
    "records/answers-twenty-h200.jsonl.gz": lambda about: calls_of(TWENTY, about["seed"]),
}
"""The plans of calls that ``handle_answers.py`` draws, by the handle, and how the calls follow from the first line."""
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
FEWEST, MOST_WRONG = 20, 0.05
"""Calls of a row that a limit is looked for in, at least, and the share of the wrong ones that it may leave."""
FEWEST_BESIDE = 3
"""Calls on either side of a limit."""
SOURCE = (
    "The engine that an H200 ran (cuDNN 9.19.0, torch 2.11) for calls whose first plans without a driver are these; "
    "0: the first of them; [size, limit, engine below, engine from the limit on]. "
    "Written by benchmarks/cudnn/missing_engines.py from {calls} calls; of {held} calls that were held out, a table "
    "made without them named the engine of {right}."
)


@dataclass(frozen=True)
class Asked:
    """A call, the first plans that are named without a driver, and the engine that a GPU runs before, or ``NAMED``."""

    kind: Kind
    one: Convolution
    listed: tuple[str, ...]
    engine: int
    is_held_out: bool = False

    @cached_property
    def impossible(self) -> frozenset[int]:
        """The engines whose method does not compute such a call: in their place runs the plan that is named."""
        engines = map(int, METHODS[self.kind])
        return frozenset(engine for engine in engines if missing_workspace(self.kind, self.one, engine) is None)

    def runs(self, entry: Engine) -> bool:
        """Return whether a row of the table names the engine that runs."""
        engine = engine_of(entry, self.one)
        return (NAMED if engine in self.impossible else engine) == self.engine

    @property
    def rows(self) -> Iterator[Row]:
        """The rows that may hold for the call, that with the most plans first."""
        return ((self.kind, group_of(self.one), key) for key in keys_of(self.listed))


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a compressed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def answered() -> Iterator[tuple[dict[str, Any], int]]:
    """Yield calls and the engine that an H200 runs."""
    for names, answers in ANSWERS:
        every = lines(HERE / names)
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


def drawn(folder: Path | None) -> Iterator[Asked]:
    """Yield the drawn calls, with the lists of a folder where there is one."""
    heuristics = _heuristics()
    for file, calls_by in DRAWN.items():
        about, found = answers_in([HERE / file])
        every, named = calls_by(about), lists_in(folder, about["calls"])
        for number, (text, *_) in found.items():
            call = every[number]
            one = as_convolution(call)
            if number in named:
                listed, first = tuple(named[number][0].split(" | ")[:LISTED]), named[number][1]
            else:
                plan = heuristics.plan(call["kind"], one, tf32=True, deterministic=False)
                listed, first = (plan.listed, str(plan.engine)) if plan and not plan.last else ((), "")
            if first and text and not first.endswith("last"):
                engine = int(text.split()[0])
                engine = NAMED if first.split()[0] == str(engine) else engine
                yield Asked(call["kind"], one, listed, engine, call["side"] == "held out")


def lists_in(folder: Path | None, calls_sum: str) -> dict[int, list[Any]]:
    """Return the lists of plans in a folder that are of the calls with this sum."""
    found: dict[int, list[Any]] = {}
    for path in sorted(folder.glob("driverless-*.jsonl.gz")) if folder else ():
        about, lists = answers_in([path])
        found |= lists if about["calls"] == calls_sum else {}
    return found


def asked() -> Iterator[Asked]:
    """Yield each of the other calls once, with the plans that the library names without a GPU."""
    heuristics, seen = _heuristics(), set()
    for call, engine in answered():
        one = as_convolution(call)
        if (call["kind"], one.key) in seen:
            continue
        seen.add((call["kind"], one.key))
        plan = heuristics.plan(call["kind"], one, tf32=True, deterministic=False)
        if plan is not None and plan.listed and not plan.last:
            yield Asked(call["kind"], one, plan.listed, NAMED if plan.engine == engine else engine)


def _heuristics() -> Heuristics:
    text = device_text(find_gpu("h200"))
    assert text is not None
    return Heuristics(cudnn_library(), text)


def table_of(every: Iterable[Asked]) -> dict[Row, Engine]:
    """Return the rows that are needed: each is wrong about fewer calls than the row of one plan less would be."""
    by_row: dict[Row, list[Asked]] = defaultdict(list)
    for call in every:
        for row in call.rows:
            by_row[row].append(call)
    table: dict[Row, Engine] = {}
    for row in sorted(by_row, key=lambda row: len(row[2])):
        shorter = ((*row[:2], row[2][:count]) for count in range(len(row[2]) - 1, -1, -1))
        inherited = next((table[other] for other in shorter if other in table), None)
        entry = entry_of(by_row[row])
        if inherited is None or wrong(entry, by_row[row]) < wrong(inherited, by_row[row]):
            table[row] = entry
    return table


def entry_of(of: list[Asked]) -> Engine:
    """Return the engine of most calls, or the limit of a size that tells them apart."""
    engines = [engine for engine, _ in Counter(call.engine for call in of).most_common()]
    usual: Engine = min(engines, key=lambda engine: wrong(engine, of))
    best, fewest = usual, int(MOST_WRONG * wrong(usual, of))
    if len(of) < FEWEST or wrong(usual, of) == 0:
        return usual
    for entry, count in limits(of, engines):
        if count <= fewest:
            best, fewest = entry, count - 1
    return best


def limits(of: list[Asked], engines: Sequence[int]) -> Iterator[tuple[Engine, int]]:
    """Yield limits between neighbouring sizes at which the engine changes, and how many calls they are wrong about."""
    for name, size_of in SIZES.items():
        order = sorted(of, key=lambda call: (size_of(call.one), call.engine))
        sizes = [size_of(call.one) for call in order]
        right = {engine: [0, *accumulate(int(call.runs(engine)) for call in order)] for engine in engines}
        for place in range(FEWEST_BESIDE, len(order) - FEWEST_BESIDE + 1):
            size, engine, next_size, next_engine = (
                sizes[place - 1], order[place - 1].engine, sizes[place], order[place].engine,
            )  # fmt: skip
            if size < next_size and engine != next_engine:
                are_right = right[engine][place] + right[next_engine][-1] - right[next_engine][place]
                yield (name, (size + next_size + 1) // 2, engine, next_engine), len(order) - are_right


def wrong(entry: Engine, of: Iterable[Asked]) -> int:
    """Return how many calls run in another engine."""
    return sum(not call.runs(entry) for call in of)


def found(table: Mapping[Row, Engine], call: Asked) -> Row | None:
    """Return the row that decides about a call."""
    return next((row for row in call.rows if row in table), None)


def is_right(table: Mapping[Row, Engine], call: Asked) -> bool:
    """Return whether the table names the engine."""
    row = found(table, call)
    return call.runs(NAMED if row is None else table[row])


def without_mistaken(table: dict[Row, Engine], held_out: Iterable[Asked]) -> dict[Row, Engine]:
    """Return the rows but those that are wrong about most of the held-out calls that they decide about."""
    decided: dict[Row, list[bool]] = defaultdict(list)
    for call in held_out:
        if (row := found(table, call)) is not None:
            decided[row].append(call.runs(table[row]))
    return {row: entry for row, entry in table.items() if not decided[row] or 2 * sum(decided[row]) > len(decided[row])}


def check(every: list[Asked], table: Mapping[Row, Engine]) -> None:
    """Print how often the table is right, by operation and group."""
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    named: dict[tuple[str, str], int] = defaultdict(int)
    for call in every:
        key = call.kind, group_of(call.one)
        right[key].append(is_right(table, call))
        named[key] += call.engine == NAMED
    for part, of in sorted(right.items()):
        print(*part, f"{len(of)} calls, {named[part]} in the named engine, {sum(of)} right", sep="; ")


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print how often a table is right about held-out calls")
    parser.add_argument("--lists", type=Path, help="folder with lists of plans that were asked for before")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    every = [*drawn(options.lists), *asked()]
    held_out = [call for call in every if call.is_held_out]
    tested = table_of(call for call in every if not call.is_held_out)
    right = sum(is_right(tested, call) for call in held_out)
    print(f"{len(tested)} rows of {len(every) - len(held_out)} calls; {right} of {len(held_out)} held out are right")
    if options.check:
        check(held_out, tested)
        return 0
    table = without_mistaken(table_of(every), held_out)
    engines: dict[str, dict[str, dict[str, Engine]]] = {kind: {} for kind in METHODS}
    for (kind, group, plans), entry in sorted(table.items(), key=lambda item: item[0]):
        engines[kind].setdefault(group, {})[" | ".join(plans)] = entry
    source = SOURCE.format(calls=f"{len(every):,}", held=f"{len(held_out):,}", right=f"{right / len(held_out):.1%}")
    counts = {"calls": len(every), "held out": len(held_out), "right": right}
    contents = {"source": source, "counts": counts, "methods": METHODS, "engines": engines}
    options.out.write_text(as_text(contents), encoding="utf-8")
    print(f"{len(table)} rows of {len(every)} calls")
    return 0


def as_text(contents: Mapping[str, Any]) -> str:
    """Return JSON with one row of the table in a line."""
    text = json.dumps(contents, indent=1)
    for entry in {json.dumps(entry, indent=1) for entry in _limits_in(contents["engines"])}:
        text = text.replace(entry.replace("\n", "\n    "), json.dumps(json.loads(entry)))
    return text + "\n"


def _limits_in(engines: Mapping[str, Mapping[str, Mapping[str, Engine]]]) -> Iterator[Engine]:
    for groups in engines.values():
        for rows in groups.values():
            yield from (entry for entry in rows.values() if not isinstance(entry, int))


if __name__ == "__main__":
    sys.exit(main())
